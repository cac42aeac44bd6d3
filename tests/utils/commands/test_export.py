"""/export: pictures in colour, and the same records as --json."""

from __future__ import annotations

import json
import os
import re
from csv import DictReader
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fakes import Screen, open_session, records_of, tiny_pair, with_speculative
from recordings import interrupt_after

from utils.comparison.charts import DotChart
from utils.repl.repl_session import ReplSession
from utils.repl.runner import Verdict
from utils.screen.renderer import Mark, Renderer, picture


@pytest.fixture
def session(view: Screen, tmp_path: Path) -> ReplSession:
    made = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("/length 12", "/debug full", "one two <b>one</b> &amp; two"):
        assert made.handle(line) is Verdict.DONE
    return made


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def texts_of(svg: str) -> list[str]:
    """The texts of a picture below its title, in reading order; blanks as blanks."""
    _, *parts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(part.itertext()).replace("\xa0", " ") for part in parts]


def words_of(svg: str) -> str:
    return "".join(texts_of(svg))


def test_the_rounds_of_the_last_prompt_in_their_colours(session: ReplSession, view: Screen, tmp_path: Path) -> None:
    shown = view.take()[0]
    assert session.handle(f"/export {tmp_path / 'x.svg'}") is Verdict.DONE
    assert (tmp_path / "x.svg").stat().st_mode & 0o777 == 0o666 & ~umask()
    svg = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    pictured = "".join(words_of(svg).replace("─", "").split())
    for line in shown.splitlines():  # everything on the screen, whatever the line breaks
        assert "".join(line.split()).replace("─", "") in pictured, line
    assert len(set(re.findall(r"fill: (#\w+)", svg))) >= 6, "accepted, rejected, corrected, figures"


def test_a_picture_shows_any_text_and_wide_characters_in_full_width() -> None:
    def show(renderer: Renderer) -> None:
        renderer.data("  def is_even(n):   x\n" + "\u2500" * 9 + " end <b>&")
        renderer.stream([("one ", Mark.ACCEPTED), ("two", Mark.TEXT), (" \u65e5\u672c\n", Mark.ACCEPTED)])

    svg = picture(show)
    texts = [text.strip() for text in texts_of(svg) if text.strip()]
    assert texts == ["def is_even(n):   x", "\u2500" * 9 + " end <b>&", "one", "two", "\u65e5\u672c"]
    assert re.search("<text (?![^>]*textLength)[^>]*>[^<]*\u65e5\u672c", svg) and svg.count("textLength") > 4


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("/whatif", "predicted speed-up"),
        ("/race 2", "speed-up over target-only"),
        ("/sweep gamma 1 2", "gamma 2, speculative"),
    ],
)
def test_a_report_becomes_a_picture_with_its_plot(
    session: ReplSession, view: Screen, tmp_path: Path, command: str, word: str
) -> None:
    assert session.handle(command) is Verdict.DONE
    assert word in view.take()[0]
    assert session.handle(f"/export {tmp_path / 'x.svg'}") is Verdict.DONE
    assert "".join(word.split()) in "".join(words_of((tmp_path / "x.svg").read_text("utf-8")).split())


def test_a_plot_has_the_measured_values(session: ReplSession) -> None:
    assert session.handle("/sweep drafter_kind loaded, loaded suffix, loaded x2") is Verdict.DONE
    shown = session.harness.state.shown
    assert shown is not None and shown.report is not None
    (chart,) = shown.report.charts(shown.findings)
    assert isinstance(chart, DotChart)
    measured = sorted(
        (f"{row['setting']}, {row['strategy']}", row["speedups"])
        for row in (finding.figures for finding in shown.findings)
        if row["strategy"] != "target"
    )
    assert sorted((row.label, list(row.values)) for row in chart.rows) == measured
    assert "drafter_kind loaded suffix, speculative suffix" in [row.label for row in chart.rows]
    assert [row.series for row in chart.rows] == sorted(row.series for row in chart.rows)


def test_records_are_those_of_the_records_file(session: ReplSession, tmp_path: Path) -> None:
    assert session.handle(f"/export {tmp_path / 'runs.jsonl'}") is Verdict.DONE
    assert records_of(tmp_path / "runs.jsonl") == records_of(tmp_path / "records.jsonl")
    session.handle("/race 2")
    assert session.handle(f"/export {tmp_path / 'race.json'}") is Verdict.DONE
    assert records_of(tmp_path / "race.json") == records_of(tmp_path / "records.jsonl")[-1:]


def test_rows_become_a_table(session: ReplSession, tmp_path: Path) -> None:
    """Of the runs of a prompt, or of the findings of a report; lists have no place in it."""
    for line, file, key in (("", "runs", "new_tokens"), ("/race 2", "race", "speedup")):
        session.handle(line)
        assert session.handle(f"/export {tmp_path / file}.csv") is Verdict.DONE
        records = records_of(tmp_path / "records.jsonl")
        records = records if file == "runs" else records[-1]["findings"]
        with (tmp_path / f"{file}.csv").open(newline="") as opened:
            rows = list(DictReader(opened))
        assert [row["strategy"] for row in rows] == [record["strategy"] for record in records]
        assert [row[key] for row in rows] == [str(record[key]) for record in records]
        assert not {"settings", "token_ids", "speedups"} & rows[0].keys()


def test_an_interrupted_report_is_exported_as_such(
    session: ReplSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 7)
    assert session.handle("/race 5") is Verdict.INTERRUPTED
    assert session.handle(f"/export {tmp_path / 'race.json'}") is Verdict.DONE
    assert json.loads((tmp_path / "race.json").read_text())["finished"] is False


def test_a_prompt_after_a_report_is_the_last_result(session: ReplSession, tmp_path: Path) -> None:
    session.handle("/whatif")
    session.handle("/debug off")
    session.handle("three")
    assert session.handle(f"/export {tmp_path / 'x.svg'}") is Verdict.DONE
    words = words_of((tmp_path / "x.svg").read_text(encoding="utf-8"))
    assert "three" in words and "predicted tokens/s" not in words and "verify" not in words
    session.handle("/debug on")
    session.handle("four")
    assert session.handle(f"/export {tmp_path / 'y.svg'}") is Verdict.DONE
    assert "verify" in words_of((tmp_path / "y.svg").read_text(encoding="utf-8")), "rounds, as on the screen"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", "/export report.html"),
        ("x.bmp", ".html, .svg, .json"),
        ("x", ".html, .svg, .json"),
        ("nowhere/x.svg", "nowhere/x.svg"),
        ("there.svg", "there.svg"),
    ],
)
def test_a_file_that_cannot_be_written_is_reported_in_one_sentence(
    session: ReplSession, view: Screen, tmp_path: Path, name: str, part: str
) -> None:
    (tmp_path / "there.svg").write_text("mine")
    view.take()
    assert session.handle(f"/export {tmp_path / name if name else ''}") is Verdict.FAILED
    messages = view.take()[1]
    assert part in messages and messages.count("\n") == 1
    assert (tmp_path / "there.svg").read_text() == "mine"


def test_nothing_to_export_yet(view: Screen, tmp_path: Path) -> None:
    assert open_session(view, tiny_pair()).handle(f"/export {tmp_path / 'x.svg'}") is Verdict.FAILED
    assert view.take()[1].count("\n") == 1 and not (tmp_path / "x.svg").exists()


def test_later_settings_do_not_change_what_is_exported(view: Screen, tmp_path: Path) -> None:
    """The engine, the settings and the causes of differences in the file are those of the run."""
    session = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("/length 12", "/processor multinomial 1", "Hello there"):
        assert session.handle(line) is Verdict.DONE
    cause = next(line for line in view.take()[0].splitlines() if "speculative differs at token" in line)
    assert session.handle("/threads 2") is Verdict.DONE and session.handle("/seed 9") is Verdict.DONE
    for form in ("json", "svg"):
        assert session.handle(f"/export {tmp_path / 'x'}.{form}") is Verdict.DONE
    assert records_of(tmp_path / "x.json") == records_of(tmp_path / "records.jsonl")
    assert records_of(tmp_path / "x.json")[0]["divergence"]["cause"] == "sampling"
    svg = words_of((tmp_path / "x.svg").read_text(encoding="utf-8"))
    assert "".join(cause.split()) in "".join(svg.split())


def test_a_report_that_needs_no_prompt_can_be_exported(view: Screen, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one two\nthree\n")
    session = open_session(view)
    for line in ("/length 4", f"/race {tmp_path / 'prompts.txt'}"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    assert session.handle(f"/export {tmp_path / 'x.svg'}") is Verdict.DONE and "report" in view.take()[1]
    assert "speculative" in words_of((tmp_path / "x.svg").read_text(encoding="utf-8"))


def test_characters_that_xml_does_not_allow_are_replaced(view: Screen, tmp_path: Path) -> None:
    session = open_session(view)
    for line in ("/length 2", "a\uffff b\ufffe"):
        assert session.handle(line) is Verdict.DONE
    assert session.handle(f"/export {tmp_path / 'x.svg'}") is Verdict.DONE
    assert "a\ufffd b\ufffd" in words_of((tmp_path / "x.svg").read_text(encoding="utf-8"))


def test_pictures_do_not_depend_on_the_terminal(
    session: ReplSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.handle(f"/export {tmp_path / 'a.svg'}") is Verdict.DONE
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)
    assert session.handle(f"/export {tmp_path / 'b.svg'}") is Verdict.DONE
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


def test_a_prompt_without_a_finished_run(view: Screen, tmp_path: Path) -> None:
    def interrupted(job: Any) -> Any:
        raise KeyboardInterrupt
        yield

    session = open_session(view, strategies=with_speculative(interrupted))
    assert session.handle("Hello") is Verdict.INTERRUPTED
    assert session.handle(f"/export {tmp_path / 'x.json'}") in (Verdict.DONE, Verdict.FAILED)
    assert not (tmp_path / "x.json").exists() or records_of(tmp_path / "x.json")
