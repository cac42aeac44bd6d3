"""Where lines come from: an interactive prompt with history, completion and a toolbar, or a pipe. No model and no strategy is known here.

Enter sends. Alt-Enter begins a new line, and so does Enter inside a block that opens with three quotation marks; what is pasted may have
several lines. Such text is sent as it stands. Ctrl-X Ctrl-E opens it in $EDITOR. F1 explains the figures.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from io import TextIOWrapper

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth

from utils.commands import Command

QUOTES = '"""'
SAY = "/say "
PARTED = " | "  # parts of the status
FIGURES = "/explain"  # what F1 types


class SlashCompleter(Completer):
    """Completes command names behind a slash, and then the first word of their argument."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands = {command.name: command for command in commands}

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        typed = document.text_before_cursor
        if not typed.startswith("/"):
            return
        name, space, argument = typed[1:].partition(" ")
        if not space:
            for command in self._commands.values():
                if command.name.startswith(name):
                    yield Completion(command.name, start_position=-len(name), display_meta=command.summary)
        elif name in self._commands:
            for word in self._commands[name].words:
                if word.startswith(argument) and word != argument:
                    yield Completion(word, start_position=-len(argument), display_meta=self._commands[name].summary)


def lines_of(typed: str) -> list[str]:
    """What was typed, as lines to carry out: a block or a text of several lines is one prompt, several commands are themselves."""
    if typed.lstrip().startswith(QUOTES):
        text = typed.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return [SAY + text] if text.strip() else []
    lines = [line for line in typed.splitlines() if line.strip()]
    if len(lines) < 2:
        return [typed]
    return lines if all(line.startswith("/") for line in lines) else [SAY + typed]


def is_open(typed: str) -> bool:
    """Whether a block was begun and not ended."""
    text = typed.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def bindings() -> KeyBindings:
    """Enter sends, but within an open block; Alt-Enter never does."""
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("f1")
    def explain(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not buffer.text:
            buffer.insert_text(FIGURES)
            buffer.validate_and_handle()

    return keys


def in_lines(status: str, width: int) -> str:
    """A line of parts, in as many lines as it takes on a screen so wide; parts stay whole."""
    lines: list[str] = []
    for part in status.split(PARTED):
        if lines and len(lines[-1]) + len(PARTED) + len(part) <= width:
            lines[-1] += PARTED + part
        else:
            lines.append(part)
    return "\n".join(lines)


def typed_lines(
    commands: Iterable[Command],
    *,
    colour: bool,
    history: History,
    status: Callable[[], str] = lambda: "",
    prompt: str = "> ",
) -> Iterator[str]:
    """Lines as they are typed, until Ctrl-D. Ctrl-C drops the line being typed. status: of the toolbar."""
    session: PromptSession[str] = PromptSession(
        completer=SlashCompleter(commands),
        history=history,
        auto_suggest=AutoSuggestFromHistory(),
        complete_while_typing=True,
        multiline=True,
        enable_open_in_editor=True,
        key_bindings=bindings(),
        prompt_continuation=lambda width, number, wrapped: " " * width if wrapped else "." * (width - 1) + " ",
        bottom_toolbar=lambda: in_lines(status(), get_app().output.get_size().columns) or None,
        color_depth=None if colour else ColorDepth.DEPTH_1_BIT,
    )
    while True:
        try:
            yield from lines_of(session.prompt(prompt))
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def piped_lines() -> Iterator[str]:
    """The lines of standard input, the last one with or without a newline."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    for line in sys.stdin or ():  # None where standard input is closed
        yield line.rstrip("\r\n")
