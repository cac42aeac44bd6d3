"""The interactive frame, driven through a pipe: typing, Ctrl-C, Ctrl-D, completion; and where piped lines end."""

import io
import sys

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from utils.commands import default_registry
from utils.repl import SlashCompleter, piped_lines, typed_lines


def typed(keys: str) -> list[str]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        return list(typed_lines(default_registry(), colour=False))


def test_lines_are_yielded_until_ctrl_d() -> None:
    assert typed("Hello\r/gamma 3\r\r\x04") == ["Hello", "/gamma 3", ""]


def test_ctrl_c_drops_the_line_being_typed() -> None:
    assert typed("half a li\x03whole\r\x04") == ["whole"]


def completions(text: str) -> list[str]:
    completer = SlashCompleter(default_registry())
    return [completion.text for completion in completer.get_completions(Document(text), CompleteEvent())]


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("/ga", ["gamma"]),
        ("/s", ["speculative", "seed", "system", "special", "set_ngramstorage", "say", "show"]),
        ("/debug o", ["on", "off"]),
        ("/processor top", ["topk", "topknucleus"]),
        ("/set_ngramstorage ", ["basic", "onelevel"]),
        ("/unknown ", []),
        ("plain text", []),
    ],
)
def test_commands_and_their_words_are_completed(text: str, offered: list[str]) -> None:
    assert completions(text) == offered


@pytest.mark.parametrize("text", ["one\ntwo\n", "one\ntwo", "one\r\ntwo\r\n"])
def test_piped_lines_end_with_or_without_a_newline(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text, newline=""))
    assert list(piped_lines()) == ["one", "two"]
