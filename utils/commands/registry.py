"""The registry of slash commands: it finds a command by its name, runs it and lists all commands for /help.

A command is a function of its argument and a CommandContext. It returns an Outcome (`utils.commands.outcomes`) or
raises a UserError with one sentence.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from utils.commands.outcomes import Outcome
from utils.comparison.harness import Harness
from utils.config.settings import Settings
from utils.config.value_types import Limits
from utils.errors import UserError
from utils.pairs.known_pairs import PAIRS, PairSpec


@dataclass(frozen=True, slots=True)
class CommandContext:
    """What a command may read. facts: (name, value) pairs that describe the loaded models, as /show lists them."""

    settings: Settings
    registry: "Registry"
    harness: Harness
    limits: Limits = field(default_factory=Limits)
    facts: tuple[tuple[str, str], ...] = ()
    pairs: Mapping[str, PairSpec] = field(default_factory=lambda: PAIRS)


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command.

    name: without the slash. usage: the argument as /help shows it, empty if there is none. summary: one line for /help.
    current: the current value, for commands that set something. words: completions of the argument.
    verbatim: whether the argument keeps its leading and trailing blanks.
    """

    name: str
    usage: str
    summary: str
    run: Callable[[str, CommandContext], Outcome]
    current: Callable[[Settings], str] = lambda settings: ""
    words: tuple[str, ...] = ()
    verbatim: bool = False

    def help_row(self, settings: Settings) -> tuple[str, str, str]:
        """(usage, current value, summary)."""
        return f"/{self.name} {self.usage}".strip(), self.current(settings), self.summary


class Registry:
    """Commands by name, in the order in which /help lists them."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands: dict[str, Command] = {}
        for command in commands:
            if command.name in self._commands:
                raise ValueError(f"There are two commands named {command.name}.")
            self._commands[command.name] = command

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def run(self, line: str, context: CommandContext) -> Outcome:
        """Run a line that begins with a slash. Raises UserError for an unknown command or an invalid argument."""
        # DOTALL, because the text of /say may have several lines. The pattern matches every line.
        match = re.fullmatch(r"/?(\S*)(?:\s(.*))?", line.lstrip(), re.DOTALL)
        assert match is not None
        name, argument = match.groups("")
        command = self.find(name)
        if not command.usage and argument.strip():
            raise UserError(f"/{name} takes no argument, but got '{argument.strip()}'.")
        try:
            return command.run(argument if command.verbatim else argument.strip(), context)
        except UserError as error:
            raise UserError(f"/{command.name}: {error}") from error

    def find(self, name: str) -> Command:
        """The command with this name. Raises UserError with the nearest name if there is none."""
        if name in self._commands:
            return self._commands[name]
        near = get_close_matches(name.lower(), self._commands, n=1, cutoff=0.5)
        hint = f"the nearest is /{near[0]}" if near else "/help lists all commands"
        raise UserError(f"There is no command /{name}; {hint}. (/say TEXT sends text that begins with a slash.)")
