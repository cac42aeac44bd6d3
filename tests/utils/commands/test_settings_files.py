"""/set, /undo, /save, /run, /history, and the line of the toolbar."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Screen, records_of, workbench

from utils.repl.runner import Verdict
from utils.screen.line_history import LineHistory, history_path


def test_settings_go_to_a_file_and_come_back(view: Screen, tmp_path: Path) -> None:
    bench, file = workbench(view), tmp_path / "evening.txt"
    for line in (
        "/gamma 7",
        "/processor nucleus 0.7 0.9",
        "/seed 5",
        "/drafter on",
        "/system be brief",
        f"/save {file}",
    ):
        assert bench.handle(line) is Verdict.DONE, view.take()
    saved, chosen = file.read_text(), bench.settings
    assert "/gamma 7\n" in saved and "/processor nucleus 0.7 0.9\n" in saved and file.stat().st_mode & 0o777 == 0o600
    for line in ("/gamma 1", "/processor greedy", "/seed 9", "/drafter off", "/system default"):
        bench.handle(line)
    assert bench.settings != chosen
    assert bench.handle(f"/run {file}") is Verdict.DONE and bench.settings == chosen
    assert bench.handle(f"/save {file}") is Verdict.DONE, "its own file may be written again"
    (tmp_path / "letter.txt").write_text("Dear all")
    assert (
        bench.handle(f"/save {tmp_path / 'letter.txt'}") is Verdict.FAILED and "holds something else" in view.take()[1]
    )
    assert (tmp_path / "letter.txt").read_text() == "Dear all"
    assert bench.handle(f"/save {tmp_path / 'no' / 'x'}") is Verdict.FAILED and "cannot be written" in view.take()[1]


def test_files_of_commands_and_prompts_run_as_if_typed(view: Screen, tmp_path: Path) -> None:
    bench = workbench(view, records=tmp_path / "records.jsonl")
    (tmp_path / "lines.txt").write_text("# a remark\n/length 3\n\nHello\n/nonsense\nHello again\n")
    assert bench.handle(f"/run {tmp_path / 'lines.txt'}") is Verdict.FAILED, "a line of it failed"
    assert [row["prompt"] for row in records_of(tmp_path / "records.jsonl")] == ["Hello"] * 3 + ["Hello again"] * 3
    (tmp_path / "quit.txt").write_text("/quit\n/length 9\n")
    assert bench.handle(f"/run {tmp_path / 'quit.txt'}") is Verdict.QUIT and bench.settings.length == 3
    (tmp_path / "self.txt").write_text(f"/run {tmp_path / 'self.txt'}\n")
    assert (
        bench.handle(f"/run {tmp_path / 'self.txt'}") is Verdict.FAILED
        and "does one of them run itself" in view.take()[1]
    )
    assert bench.handle(f"/run {tmp_path / 'lines.txt'}") is Verdict.FAILED
    for line, words in (
        ("/run", "give a file"),
        ("/run /nowhere", "cannot be read"),
        ("/run ~nosuchuser/x", "cannot be a path"),
        ("/save a\0b", "cannot be a path"),
    ):
        assert bench.handle(line) is Verdict.FAILED and words in view.take()[1]


def test_changes_are_taken_back_one_by_one(view: Screen) -> None:
    bench = workbench(view)
    first = bench.settings
    assert bench.handle("/undo") is Verdict.FAILED and "Nothing was changed" in view.take()[1]
    bench.handle("/gamma 9")
    bench.handle("/length 12")
    bench.handle("/length 12")
    bench.handle("/length nonsense")
    view.take()
    assert bench.handle("/undo") is Verdict.DONE and view.take()[1].strip() == f"length: {first.length}"
    assert bench.handle("/undo") is Verdict.DONE and bench.settings == first
    assert bench.handle("/undo") is Verdict.FAILED


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set gamma 70", "0 to 63"),
        ("/set", "no command"),
        ("/set lenght 3", "nearest is /length"),
        ("/set quit 1", "no setting"),
    ],
)
def test_set_says_what_it_takes(view: Screen, line: str, words: str) -> None:
    assert workbench(view).handle(line) is Verdict.FAILED and words in view.take()[1]


def test_set_sets(view: Screen) -> None:
    bench = workbench(view)
    for line in ("/set gamma 3", "/set /processor multinomial 0.5", "/set debug on"):
        assert bench.handle(line) is Verdict.DONE
    assert bench.settings.gamma == 3 and bench.settings.debug and bench.settings.processor.name == "multinomial"


def test_history_is_listed(view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bench = workbench(view)
    assert bench.handle("/history") is Verdict.DONE and "nothing was typed yet" in view.take()[1]
    history = LineHistory(history_path(), print)
    for line in ("one", "two", "three"):
        history.store_string(line)
    assert bench.handle("/history 2") is Verdict.DONE
    shown = view.take()[0]
    assert "two" in shown and "three" in shown and "one" not in shown
    assert bench.handle("/history 0") is Verdict.FAILED


def test_the_toolbar_tells_pair_settings_and_last_speeds(view: Screen) -> None:
    bench = workbench(view)
    assert bench.status() == "tiny-target + tiny-drafter | gamma 4 | processor greedy | verify rejection | plain"
    bench.handle("/length 3")
    bench.handle("Hello")
    assert "| tokens/s: speculative " in bench.status() and ", target " in bench.status()
