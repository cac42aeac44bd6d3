"""Where lines come from: an interactive prompt with history and completion, or a pipe. No model and no strategy is known here."""

import sys
from collections.abc import Iterable, Iterator
from io import TextIOWrapper

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.output import ColorDepth

from utils.commands import Command


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
                    yield Completion(word, start_position=-len(argument))


def typed_lines(commands: Iterable[Command], *, colour: bool, prompt: str = "> ") -> Iterator[str]:
    """Lines as they are typed, until Ctrl-D. Ctrl-C drops the line being typed."""
    session: PromptSession[str] = PromptSession(
        completer=SlashCompleter(commands),
        history=InMemoryHistory(),
        complete_while_typing=True,
        color_depth=None if colour else ColorDepth.DEPTH_1_BIT,
    )
    while True:
        try:
            yield session.prompt(prompt)
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
