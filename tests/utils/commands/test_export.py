"""/export: the same records as --json, and rows."""

from __future__ import annotations

import json
from csv import DictReader
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of, tiny_pair, with_speculative
from recordings import interrupt_after

from utils.comparison.harness import Harness
from utils.engine import Engine
from utils.repl.repl_session import ReplSession, Verdict


@pytest.fixture
def session(view: Screen, tmp_path: Path) -> ReplSession:
    made = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("/length 12", "/debug full", "one two <b>one</b> &amp; two"):
        assert made.handle(line) is Verdict.DONE
    return made


def test_records_are_those_of_the_records_file(session: ReplSession, tmp_path: Path) -> None:
    assert session.handle(f"/export {tmp_path / 'runs.jsonl'}") is Verdict.DONE
    assert records_of(tmp_path / "runs.jsonl") == records_of(tmp_path / "records.jsonl")
    session.handle("/race 2")
    assert session.handle(f"/export {tmp_path / 'race.json'}") is Verdict.DONE
    assert records_of(tmp_path / "race.json") == records_of(tmp_path / "records.jsonl")[-1:]


@pytest.mark.parametrize("line", ["/threads 1", "/engine test"])
def test_records_that_are_exported_later_name_the_engine_of_the_runs(
    line: str, view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, state = open_session(view), ["first"]
    monkeypatch.setattr(Engine, "figures", lambda engine: {"kind": state[0]})
    monkeypatch.setattr(Harness, "start_engine", lambda harness, settings, anew=False: state.append(state.pop() + "x"))
    for typed in ("/length 2", "Hello", line, f"/export {tmp_path / 'runs.jsonl'}"):
        assert session.handle(typed) is Verdict.DONE, view.take()
    assert state == ["firstx"] and all(
        row["engine"] == {"kind": "first"} for row in records_of(tmp_path / "runs.jsonl")
    )


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


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", "/export report.html"),
        ("x.bmp", ".html, .json"),
        ("x", ".html, .json"),
        ("nowhere/x.csv", "nowhere/x.csv"),
        ("there.csv", "there.csv"),
    ],
)
def test_a_file_that_cannot_be_written_is_reported_in_one_sentence(
    session: ReplSession, view: Screen, tmp_path: Path, name: str, part: str
) -> None:
    (tmp_path / "there.csv").write_text("mine")
    view.take()
    assert session.handle(f"/export {tmp_path / name if name else ''}") is Verdict.FAILED
    messages = view.take()[1]
    assert part in messages and messages.count("\n") == 1
    assert (tmp_path / "there.csv").read_text() == "mine"


def test_nothing_to_export_yet(view: Screen, tmp_path: Path) -> None:
    assert open_session(view, tiny_pair()).handle(f"/export {tmp_path / 'x.csv'}") is Verdict.FAILED
    assert view.take()[1].count("\n") == 1 and not (tmp_path / "x.csv").exists()


def test_later_settings_do_not_change_what_is_exported(view: Screen, tmp_path: Path) -> None:
    """The engine, the settings and the causes of differences in the file are those of the run."""
    session = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("/length 12", "/processor multinomial 1", "Hello there"):
        assert session.handle(line) is Verdict.DONE
    assert session.handle("/threads 2") is Verdict.DONE and session.handle("/seed 9") is Verdict.DONE
    assert session.handle(f"/export {tmp_path / 'x'}.json") is Verdict.DONE
    assert records_of(tmp_path / "x.json") == records_of(tmp_path / "records.jsonl")
    assert records_of(tmp_path / "x.json")[0]["divergence"]["cause"] == "sampling"


def test_a_prompt_without_a_finished_run(view: Screen, tmp_path: Path) -> None:
    def interrupted(job: Any) -> Any:
        raise KeyboardInterrupt
        yield

    session = open_session(view, strategies=with_speculative(interrupted))
    assert session.handle("Hello") is Verdict.INTERRUPTED
    assert session.handle(f"/export {tmp_path / 'x.json'}") in (Verdict.DONE, Verdict.FAILED)
    assert not (tmp_path / "x.json").exists() or records_of(tmp_path / "x.json")
