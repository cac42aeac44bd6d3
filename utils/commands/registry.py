"""The registry: commands as frozen values in an instance; lookup, nearest names, help rows.

A command is a function of its argument and the situation to an Outcome. It prints nothing and changes nothing: the caller applies the
outcome. Errors are UserErrors, one sentence each.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum, auto
from typing import Any

from utils.comparison.harness import Bench
from utils.comparison.reports import Column, Report
from utils.config.settings import Settings
from utils.config.value_types import Limits
from utils.errors import UserError
from utils.pairs.known_pairs import PAIRS, PairSpec


class Action(Enum):
    """What the caller is asked to do besides showing the reply."""

    CLEAR = auto()
    QUIT = auto()
    UNDO = auto()
    RESET = auto()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A command's answer: new settings, a reply, rows or columns to show, a prompt to generate from, models to run, an action.

    lines: to be carried out one after the other, as if typed. storage: an n-gram storage to go on with. load: models to go on with, a
    utils.pairs.request.PairRequest.
    """

    settings: Settings | None = None
    reply: str = ""
    rows: tuple[tuple[str, str, str], ...] = ()
    columns: tuple[Column, ...] = ()
    prompt: str | None = None
    lines: tuple[str, ...] = ()
    report: Report | None = None
    storage: Any = None
    load: Any = None
    action: Action | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """What a command may look at."""

    settings: Settings
    registry: "Registry"
    bench: Bench
    limits: Limits = field(default_factory=Limits)
    facts: tuple[tuple[str, str], ...] = ()  # (name, value) of what is loaded
    pairs: Mapping[str, PairSpec] = field(default_factory=lambda: PAIRS)


@dataclass(frozen=True, slots=True)
class Command:
    """name without its slash, usage of its argument, one-line summary, what it does, and how its current value reads.

    words: completions of the argument. verbatim: the argument is handed over with its outer blanks.
    """

    name: str
    usage: str
    summary: str
    run: Callable[[str, Situation], Outcome]
    current: Callable[[Settings], str] = lambda settings: ""
    words: tuple[str, ...] = ()
    verbatim: bool = False


class Registry:
    """Commands by name, in the order /help shows them."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands: dict[str, Command] = {}
        for command in commands:
            if command.name in self._commands:
                raise ValueError(f"two commands are called {command.name}")
            self._commands[command.name] = command

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def run(self, line: str, situation: Situation) -> Outcome:
        """Carry out a line that begins with a slash. Raises UserError for an unknown name or a bad argument."""
        name, argument = re.fullmatch(r"/?(\S*)(?:\s(.*))?", line.lstrip(), re.DOTALL).groups("")  # type: ignore[union-attr]
        command = self.find(name)
        if not command.usage and argument.strip():
            raise UserError(f"/{name} takes no argument; '{argument.strip()}' is one too many.")
        try:
            return command.run(argument if command.verbatim else argument.strip(), situation)
        except UserError as error:
            raise UserError(f"/{command.name}: {error}") from error

    def find(self, name: str) -> Command:
        """The command of this name; UserError with the nearest name otherwise."""
        if name in self._commands:
            return self._commands[name]
        near = get_close_matches(name.lower(), self._commands, n=1, cutoff=0.5)
        hint = f"the nearest is /{near[0]}" if near else "/help lists them"
        raise UserError(f"There is no command /{name}; {hint}. (/say TEXT sends text that begins with a slash.)")

    def help_rows(self, settings: Settings) -> tuple[tuple[str, str, str], ...]:
        """(usage, current value, summary) of every command."""
        return tuple(
            (f"/{command.name} {command.usage}".strip(), command.current(settings), command.summary) for command in self
        )
