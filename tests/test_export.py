"""What was shown last, as a file: colours and shapes in pictures, plots as PNG, and the records as --json has them."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
from fakes import Screen, records_of, tiny_pair, workbench

from utils.commands import race
from utils.runner import Verdict
from utils.workbench import Workbench


@pytest.fixture
def bench(view: Screen, tmp_path: Path) -> Workbench:
    made = workbench(view, records=tmp_path / "records.jsonl")
    for line in ("/length 12", "/debug full", "one two <b>one</b> &amp; two"):
        assert made.handle(line) is Verdict.DONE
    return made


def words_of(svg: str) -> str:
    return "".join("".join(part.itertext()) for part in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))


def test_the_rounds_of_the_last_prompt_in_their_colours(bench: Workbench, view: Screen, tmp_path: Path) -> None:
    shown = view.take()[0]
    for form in ("svg", "html"):
        assert bench.handle(f"/export {tmp_path / form}.{form}") is Verdict.DONE
        assert (tmp_path / f"{form}.{form}").stat().st_mode & 0o777 == 0o600
    svg, html = (tmp_path / "svg.svg").read_text(encoding="utf-8"), (tmp_path / "html.html").read_text(encoding="utf-8")
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
    pictured = "".join(words_of(svg).split())
    for line in shown.splitlines():  # all that was on the screen, wherever lines are broken
        assert "".join(line.split()).replace("─", "") in pictured.replace("─", ""), line
    assert "<b>one</b>" not in html and "&lt;b&gt;one" in html and "+" in unescape(re.sub("<[^>]*>", "", html))
    colours = set(re.findall(r"color: (#\w+)", html))
    assert len(colours) >= 4, "accepted, rejected, the target's and the figures"


def test_a_report_becomes_a_picture_and_its_plot_a_png(bench: Workbench, view: Screen, tmp_path: Path) -> None:
    assert bench.handle(f"/export {tmp_path / 'none.png'}") is Verdict.FAILED and "only what has a plot" in view.take()[1]
    for command, word in (("/whatif", "predicted tokens/s"), ("/race 2", "within each repeat"), ("/sweep gamma 1 2", "best:")):
        assert bench.handle(command) is Verdict.DONE
        name = tmp_path / word.replace("/", "").replace(" ", "").replace(":", "")
        for form in ("png", "svg"):
            assert bench.handle(f"/export {name}.{form}") is Verdict.DONE
        assert "".join(word.split()) in "".join(words_of(Path(f"{name}.svg").read_text(encoding="utf-8")).split())
        png = Path(f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 5000


def test_a_plot_has_the_values_that_were_found(bench: Workbench) -> None:
    assert bench.handle("/sweep processor greedy, nucleus 0.8 0.9") is Verdict.DONE
    report, findings, _ = bench._bench.memory.found
    chart = report.chart(findings)
    assert chart.ticks == ["greedy", "nucleus 0.8 0.9"] and set(chart.series) == {"speculative", "ngram", "target"}
    told = [median(finding.figures["tokens_per_second"]) for finding in findings if finding.figures["strategy"] == "ngram"]
    assert chart.series["ngram"] == told and chart.below == "processor"


def test_records_are_those_of_the_records_file(bench: Workbench, tmp_path: Path) -> None:
    assert bench.handle(f"/export {tmp_path / 'runs.json'}") is Verdict.DONE
    assert records_of(tmp_path / "runs.json") == records_of(tmp_path / "records.jsonl")
    bench.handle("/race 2")
    assert bench.handle(f"/export {tmp_path / 'race.json'}") is Verdict.DONE
    assert records_of(tmp_path / "race.json") == records_of(tmp_path / "records.jsonl")[-1:]


def test_an_interrupted_report_is_exported_as_such(bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = race.run_alone, iter(range(100))

    def run(*arguments: Any, **options: Any) -> Any:
        if next(count) == 7:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(race, "run_alone", run)
    assert bench.handle("/race 5") is Verdict.INTERRUPTED
    assert bench.handle(f"/export {tmp_path / 'race.json'}") is Verdict.DONE
    assert json.loads((tmp_path / "race.json").read_text())["finished"] is False


def test_a_prompt_after_a_report_is_what_was_shown_last(bench: Workbench, tmp_path: Path) -> None:
    bench.handle("/whatif")
    bench.handle("/debug off")
    bench.handle("three")
    assert bench.handle(f"/export {tmp_path / 'x.svg'}") is Verdict.DONE
    words = words_of((tmp_path / "x.svg").read_text(encoding="utf-8"))
    assert "three" in words and "predicted" not in words and "verify" in words, "with its rounds, though they were not shown"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "give a file"),
        ("x.bmp", "is unknown; choose one of html, svg, png, json"),
        ("x", "is unknown"),
        ("nowhere/x.svg", "cannot be written"),
        ("there.svg", "is there already"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(bench: Workbench, view: Screen, tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "there.svg").write_text("mine")
    view.take()
    assert bench.handle(f"/export {tmp_path / name if name else ''}") is Verdict.FAILED
    messages = view.take()[1]
    assert sentence in messages and messages.count("\n") == 1
    assert (tmp_path / "there.svg").read_text() == "mine"


def test_nothing_to_export_yet(view: Screen, tmp_path: Path) -> None:
    assert workbench(view, tiny_pair()).handle(f"/export {tmp_path / 'x.svg'}") is Verdict.FAILED
    assert "a prompt is needed" in view.take()[1]
