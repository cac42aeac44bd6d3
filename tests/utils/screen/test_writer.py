"""What reaches a terminal, a pipe and a file: progress lines, whole tables, nothing twice."""

from __future__ import annotations

import sys
from io import StringIO

import pytest
from fakes import open_session, screen
from rich.console import Console
from terminal import Terminal

from utils.repl.loaded_pair import BackgroundTask
from utils.repl.repl_session import Verdict
from utils.screen.renderer import ACCEPTED, Renderer, Text, make_renderer
from utils.text import Count

LONG_CELL = "a cell with many words, " * 10


class Interrupting(StringIO):
    """A terminal on which Ctrl-C is pressed while a text with this word is flushed, once."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self._word: str | None = word

    def flush(self) -> None:
        if self._word is not None and self._word in self.getvalue():
            self._word = None
            raise KeyboardInterrupt


def test_a_table_that_ctrl_c_interrupts_is_not_shown_twice() -> None:
    file = Interrupting("verdict")
    renderer = Renderer(*[Console(file=file, width=80)] * 2, colour=False)
    with pytest.raises(KeyboardInterrupt):
        renderer.table(("strategy", "verdict"), [("target", "the baseline")])
    renderer.note("Interrupted.")
    assert file.getvalue().count("verdict") == 1 and file.getvalue().endswith("Interrupted.\n")


@pytest.mark.parametrize("columns", [None, "80"])
def test_piped_tables_are_whole_and_have_no_trailing_blanks(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    renderer = make_renderer(interactive=False)
    renderer.table(("strategy", "about"), [("target", LONG_CELL), ("ngram", "short")])
    renderer.rows([("target", LONG_CELL)])
    shown = capsys.readouterr().out
    assert shown == "".join(line.rstrip() + "\n" for line in shown.splitlines())
    assert (shown.count(LONG_CELL.strip()) == 2) is (columns is None)
    assert columns is None or max(map(len, shown.splitlines())) <= 80


def test_progress_is_one_line_that_the_next_output_replaces() -> None:
    view = screen(width=60, colour=True)
    for text in ("measuring 1 of 3, a longer line", "measuring 2 of 3", "wide " * 30):
        view.renderer.progress(text)
        lines = Terminal(view.messages.getvalue()).lines
        assert len(lines) == 1 and len(lines[0]) < 60 and lines[0].startswith(text[:40].rstrip())
    view.renderer.note("done")
    assert Terminal(view.messages.getvalue()).lines == ["done", ""]


def test_results_clear_the_progress_line_of_the_messages() -> None:
    view = screen(colour=True)
    view.renderer.progress("working")
    view.renderer.stream(Text.assemble(("text", ACCEPTED)))
    assert Terminal(view.messages.getvalue()).lines == [""]


def test_hundreds_of_messages_about_one_file_are_few_lines_of_a_pipe() -> None:
    view = screen(colour=False)
    for size in range(300):
        view.renderer.announce(Count(f"reading model: {size} of 300 MB"))
    view.renderer.announce("read")
    lines = view.messages.getvalue().splitlines()
    assert len(lines) <= 2 and lines[-1] == "read"


def test_progress_without_a_terminal_is_lines_and_counts_are_left_out() -> None:
    view = screen()
    view.renderer.progress("one")
    view.renderer.count("45/128 tokens")
    view.renderer.progress("two")
    view.renderer.end_progress()
    assert view.take() == ("", "one\ntwo\n")


def test_progress_of_models_and_users_is_shown_literally() -> None:
    view = screen(colour=True)
    view.renderer.progress("\x1b[2J\n[bold]")
    shown = view.messages.getvalue()
    assert "\x1b[2J" not in shown and "[bold]" in shown and "\n" not in shown


def test_a_closed_pipe_is_reported_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        make_renderer(interactive=False).table(("a",), [("b",)])


def test_no_line_leaves_its_progress_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are still being warmed up, and the line itself shows nothing."""
    view = screen(colour=True)
    session = open_session(view)
    monkeypatch.setattr(BackgroundTask, "is_alive", lambda task: True)
    monkeypatch.setattr(BackgroundTask, "wait", lambda task: None)
    assert session.handle("/quit") is Verdict.QUIT
    assert view.messages.getvalue() and Terminal(view.messages.getvalue()).lines == [""]
