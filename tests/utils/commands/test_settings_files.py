"""/set, /undo, /save, /run, /history, and the toolbar."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Screen, open_session, records_of

from utils.repl.repl_session import MAX_NESTED_FILES
from utils.repl.runner import Verdict
from utils.repl.session_settings import NOTHING_TO_UNDO
from utils.screen.line_history import LineHistory, history_path


def test_settings_are_saved_and_restored(view: Screen, tmp_path: Path) -> None:
    session, file = open_session(view), tmp_path / "evening.txt"
    for line in (
        "/gamma 7",
        "/processor nucleus 0.7 0.9",
        "/seed 5",
        "/drafter on",
        "/system be brief",
        f"/save {file}",
    ):
        assert session.handle(line) is Verdict.DONE, view.take()
    saved, chosen = file.read_text(), session.settings
    assert "/gamma 7\n" in saved and "/processor nucleus 0.7 0.9\n" in saved and file.stat().st_mode & 0o777 == 0o600
    for line in ("/gamma 1", "/processor greedy", "/seed 9", "/drafter off", "/system default"):
        session.handle(line)
    assert session.settings != chosen
    assert session.handle(f"/run {file}") is Verdict.DONE and session.settings == chosen
    assert session.handle(f"/save {file}") is Verdict.DONE, "a settings file may be overwritten"
    (tmp_path / "letter.txt").write_text("Dear all")
    view.take()
    for path in (tmp_path / "letter.txt", tmp_path / "no" / "x"):
        assert session.handle(f"/save {path}") is Verdict.FAILED and str(path) in view.take()[1]
    assert (tmp_path / "letter.txt").read_text() == "Dear all"


def test_files_of_commands_and_prompts_run_as_if_typed(view: Screen, tmp_path: Path) -> None:
    session = open_session(view, records=tmp_path / "records.jsonl")
    (tmp_path / "lines.txt").write_text("# a remark\n/length 3\n\nHello\n/nonsense\nHello again\n")
    assert session.handle(f"/run {tmp_path / 'lines.txt'}") is Verdict.FAILED, "one of its lines failed"
    assert [row["prompt"] for row in records_of(tmp_path / "records.jsonl")] == ["Hello"] * 3 + ["Hello again"] * 3
    (tmp_path / "quit.txt").write_text("/quit\n/length 9\n")
    assert session.handle(f"/run {tmp_path / 'quit.txt'}") is Verdict.QUIT and session.settings.length == 3
    (tmp_path / "self.txt").write_text(f"/run {tmp_path / 'self.txt'}\n")
    view.take()
    assert session.handle(f"/run {tmp_path / 'self.txt'}") is Verdict.FAILED
    assert f"{MAX_NESTED_FILES}" in view.take()[1].splitlines()[-1]
    assert session.handle(f"/run {tmp_path / 'lines.txt'}") is Verdict.FAILED
    for line, part in (
        ("/run", "/run evening.txt"),
        ("/run /nowhere", "/nowhere"),
        ("/run ~nosuchuser/x", "~nosuchuser/x"),
        ("/save a\0b", "/save"),
    ):
        view.take()
        assert session.handle(line) is Verdict.FAILED and part in view.take()[1]


def test_changes_are_undone_one_by_one(view: Screen) -> None:
    session = open_session(view)
    first = session.settings
    assert session.handle("/undo") is Verdict.FAILED and NOTHING_TO_UNDO in view.take()[1]
    session.handle("/gamma 9")
    session.handle("/length 12")
    session.handle("/length 12")
    session.handle("/length nonsense")
    view.take()
    assert session.handle("/undo") is Verdict.DONE and view.take()[1].strip() == f"length: {first.length}"
    assert session.handle("/undo") is Verdict.DONE and session.settings == first
    assert session.handle("/undo") is Verdict.FAILED


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/set gamma 70", "0 to 63"),
        ("/set", "/help"),
        ("/set lenght 3", "/length"),
        ("/set quit 1", "'quit'"),
    ],
)
def test_set_rejects_bad_names_and_values(view: Screen, line: str, part: str) -> None:
    assert open_session(view).handle(line) is Verdict.FAILED and part in view.take()[1]


def test_set_changes_settings(view: Screen) -> None:
    session = open_session(view)
    for line in ("/set gamma 3", "/set /processor multinomial 0.5", "/set debug on"):
        assert session.handle(line) is Verdict.DONE
    assert session.settings.gamma == 3 and session.settings.debug and session.settings.processor.name == "multinomial"


def test_history_is_listed(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    session = open_session(view)
    assert session.handle("/history") is Verdict.DONE and str(history_path()) in view.take()[1]
    history = LineHistory(history_path(), print)
    for line in ("one", "two", "three"):
        history.store_string(line)
    assert session.handle("/history 2") is Verdict.DONE
    shown = view.take()[0]
    assert "two" in shown and "three" in shown and "one" not in shown
    assert session.handle("/history 0") is Verdict.FAILED


def test_the_toolbar_shows_pair_settings_and_last_speeds(view: Screen) -> None:
    session = open_session(view)
    assert session.status() == "tiny-target + tiny-drafter | gamma 4 | processor greedy | verify rejection | plain"
    session.handle("/length 3")
    session.handle("Hello")
    assert "| tokens/s: speculative " in session.status() and ", target " in session.status()
