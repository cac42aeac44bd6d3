"""The interactive prompt, driven through a pipe: typing, Ctrl-C, Ctrl-D, completion, history; and piped lines."""

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from utils.commands import default_registry
from utils.repl import line_input
from utils.repl.line_input import (
    LineHistory,
    SlashCompleter,
    history_path,
    is_open_block,
    piped_lines,
    split_lines,
    typed_lines,
    wrap_status,
)


def typed(keys: str) -> list[str]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        return list(
            typed_lines(default_registry(), colour=False, history=InMemoryHistory(), status=lambda: "all is well")
        )


def typed_slowly(*keys: str) -> list[str]:
    """As `typed`, with a pause after each part until the line changes, at most a second: completion runs in the
    background.
    """
    made: list[PromptSession[str]] = []

    class Kept(PromptSession[str]):
        def prompt(self, *arguments: Any, **options: Any) -> str:
            made.append(self)
            return super().prompt(*arguments, **options)

    with (
        mock.patch.object(line_input, "PromptSession", Kept),
        create_pipe_input() as pipe,
        create_app_session(input=pipe, output=DummyOutput()),
    ):

        def shown() -> str:
            return made[-1].default_buffer.text if made else ""

        def send() -> None:
            for part in keys:
                before, end = shown(), time.monotonic() + 1
                pipe.send_text(part)
                while shown() == before and time.monotonic() < end:
                    time.sleep(0.01)

        sender = threading.Thread(target=send)
        sender.start()
        lines = list(typed_lines(default_registry(), colour=False, history=InMemoryHistory()))
        sender.join()
        return lines


def test_lines_are_yielded_until_ctrl_d() -> None:
    assert typed("Hello\r/gamma 3\r\r\x04") == ["Hello", "/gamma 3", ""]


def test_keys_are_not_echoed_while_a_line_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = [True]

    @contextmanager
    def quiet() -> Iterator[None]:
        echo[0] = False
        yield
        echo[0] = True

    monkeypatch.setattr(line_input, "quiet_keyboard", quiet)
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text("one\rtwo\r\x04")
        for _ in typed_lines(default_registry(), colour=False, history=InMemoryHistory()):
            assert not echo[0]
    assert echo[0]


def test_no_room_is_kept_for_a_menu_before_a_slash_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """/help has 18 lines and the toolbar three, so a terminal of 24 lines has none to spare."""
    made: list[PromptSession[str]] = []

    class Kept(PromptSession[str]):
        def prompt(self, *arguments: Any, **options: Any) -> str:
            made.append(self)
            return super().prompt(*arguments, pre_run=look, **options)

    heights: dict[str, int] = {}

    def look() -> None:
        for text in ("", "/"):
            made[-1].default_buffer.text = text
            height = made[-1]._get_default_buffer_control_height()
            heights[text] = height.min
        made[-1].default_buffer.text = ""

    monkeypatch.setattr(line_input, "PromptSession", Kept)
    assert typed("\x04") == [] and heights == {"": 0, "/": 8}


def test_a_long_status_is_wrapped() -> None:
    assert wrap_status("one | two | three", 80) == "one | two | three" and wrap_status("", 80) == ""
    assert (
        wrap_status("one | two | three | four", 10) == "one | two\nthree\nfour"
        and wrap_status("one | two", 2) == "one\ntwo"
    )


def test_ctrl_c_drops_the_line_being_typed() -> None:
    assert typed("half a li\x03whole\r\x04") == ["whole"]


def test_several_lines_are_one_prompt_but_several_commands_stay_separate() -> None:
    assert typed('"""\rdef f():\r    return "\\n"\r"""\r\x04') == ['"""\ndef f():\n    return "\\n"\n"""']
    assert typed("one\x1b\rtwo\r\x04") == ['"""one\ntwo"""'], "Alt-Enter begins a line"
    assert typed("\x1b[200~/length 5\n/gamma 3\x1b[201~\r\x04") == ["/length 5", "/gamma 3"], "pasted"
    assert typed("\x1b[200~some\n/text\n\nof three\x1b[201~\r\x04") == ['"""some\n/text\n\nof three"""']
    assert split_lines('"""one line"""') == ['"""one line"""'] and split_lines("/x\n") == ["/x\n"]
    # Only a newline ends a line: the text of a setting never becomes a command.
    for separator in "\r\x0b\x0c\x1c\x85\u2028":
        assert split_lines(f"/system a{separator}/seed 7") == [f"/system a{separator}/seed 7"]
    assert (
        is_open_block('"""') and is_open_block('"""a\n""') and not is_open_block('"""a"""') and not is_open_block("a")
    )


def test_the_history_is_readable_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    warnings: list[str] = []
    history = LineHistory(history_path(), warnings.append)
    for line in ("first", "two\nlines", "third"):
        history.append_string(line)
    assert history_path().stat().st_mode & 0o777 == 0o600 and history_path().parent.stat().st_mode & 0o777 == 0o700
    assert list(LineHistory(history_path(), warnings.append).load_history_strings()) == ["third", "two\nlines", "first"]
    assert not warnings
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert history_path().is_relative_to(Path.home() / ".local")


def test_an_unusable_history_file_is_reported_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "file").write_text("")
    history = LineHistory(tmp_path / "file" / "history", warnings.append)
    for line in ("a", "b"):
        history.append_string(line)
    assert history.get_strings() == ["a", "b"] and list(history.load_history_strings()) == []
    assert len(warnings) == 1 and str(tmp_path / "file" / "history") in warnings[0]


def completions(text: str) -> list[Completion]:
    completer = SlashCompleter(default_registry())
    return list(completer.get_completions(Document(text), CompleteEvent()))


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("/gam", ["gamma"]),
        ("/GAM", ["gamma"]),
        ("/sp", ["speculative", "special"]),
        ("/debug o", ["on", "off"]),
        ("/processor top", ["topk", "topknucleus"]),
        ("/ngram k", ["kind", "keep"]),
        ("/pair ", ["list", "doctor"]),
        ("/turns n", ["new"]),
        ("/top_k_", []),
        ("/help top", ["top_k", "top_p"]),
        ("/explain draft", ["drafts/round", "draft | verify | other", "draft cost (c)"]),
        ("/unknown ", []),
        ("plain text", []),
    ],
)
def test_commands_and_their_words_are_completed(text: str, offered: list[str]) -> None:
    assert [completion.text for completion in completions(text)] == offered


def test_completion_lists_commands_as_help_does() -> None:
    names = [completion.text for completion in completions("/")]
    assert names == [command.name for command in default_registry().visible()]
    assert not {"top_k_filler", "exit"} & set(names)


def test_every_value_has_its_own_description() -> None:
    for command in default_registry().visible():
        if any(command.words.values()):
            words = [word for word in completions(f"/{command.name} ") if word.text in command.words]
            meanings = [word.display_meta_text for word in words]
            assert all(meanings) and (len(set(meanings)) == len(meanings) or command.name == "load"), command.name
    processors = [(word.text, word.display_meta_text) for word in completions("/processor ")]
    assert len(processors) == 5 and all("T" in meaning for _, meaning in processors)


def test_names_of_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "answers.ngrams").touch()
    for line in (
        "/race 5 ",
        "/verdict ",
        "/compare a.jsonl ",
        "/export ",
        "/run ",
        "/save ",
        "/replay ",
        "/ngram load ",
        "/ngram save ",
    ):
        assert [found.text for found in completions(f"{line}{tmp_path}/ans")] == ["wers.ngrams"], line
    assert completions(f"/ngram {tmp_path}/ans") == [] and completions(f"/gamma {tmp_path}/ans") == []


@pytest.mark.parametrize("tabs", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_a_second_tab_keeps_the_only_completion(tabs: int) -> None:
    assert typed_slowly("/proc", *["\t"] * tabs, "\r\x04") == ["/processor"]


def test_tab_goes_through_several_completions() -> None:
    assert typed_slowly("/debug o", "\t", "\r\x04") == ["/debug on"]
    assert typed_slowly("/debug o", "\t", "\t", "\r\x04") == ["/debug off"]


@pytest.mark.parametrize("text", ["one\ntwo\n", "one\ntwo", "one\r\ntwo\r\n", "\ufeffone\ntwo\n"])
def test_piped_lines_end_with_or_without_a_newline(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text, newline=""))
    assert list(piped_lines()) == ["one", "two"]
