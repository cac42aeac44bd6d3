"""What every command is made of: the command, what it may read, what it requests from the session, and the registry.

A command is a function of its argument and a CommandContext. It prints and changes nothing: it returns an Outcome, and
`utils.repl.repl_session` applies its effects in order, or it raises a UserError with one sentence. Every command that
writes follows one convention: `/save FILE` refuses a file that exists, and `/save FILE overwrite` replaces it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum, auto
from pathlib import Path

from ngram_assisted import NGramStorage
from utils.comparison.harness import Harness
from utils.comparison.records import Report
from utils.comparison.training import Training
from utils.config.settings import Settings
from utils.config.value_types import Limits
from utils.errors import UserError, naming
from utils.models.sources import parse_path
from utils.pairs.pair import Pair
from utils.pairs.request import PAIRS, PairRequest, PairSpec
from utils.servers.address import ServerAddress
from utils.text import QUOTES


@dataclass(frozen=True, slots=True)
class Reply:
    """Show a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ShowRows:
    """Show rows under headings, or without headings a list, the cells of whose first column are bold."""

    rows: Sequence[tuple[str, ...]]
    headings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ChangeSettings:
    """Use these settings from now on, and then show the reply. /undo reverts the change."""

    settings: Settings
    reply: str = ""


@dataclass(frozen=True, slots=True)
class UseServers:
    """Send every prompt to these servers from now on."""

    addresses: Sequence[ServerAddress]


@dataclass(frozen=True, slots=True)
class RunLines:
    """Process these lines as if they were typed, one after the other."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class UseTraining:
    """Start a training, which replaces the present one. None ends that one."""

    start: Callable[[], Training] | None


@dataclass(frozen=True, slots=True)
class RaceDrafters:
    """Run a report, and then use the pair that `winner` returns, if it returns one. /undo goes back."""

    report: Report
    winner: Callable[[], Pair | None]


class Action(Enum):
    """An effect without values."""

    RETEST_ENGINE = auto()  # run the engine's self-test and all its measurements again
    UNDO_SETTINGS = auto()  # revert the last change of settings, or of the drafter
    FORGET_CONVERSATIONS = auto()  # begin new conversations with the next prompt
    CLEAR_SCREEN = auto()
    QUIT = auto()  # end the session


# A storage is used from now on, the models of a request are loaded, and a report is run, shown and recorded.
Change = ChangeSettings | NGramStorage | PairRequest | UseServers | UseTraining
Effect = Reply | ShowRows | Change | RunLines | Report | RaceDrafters | Action
Outcome = Sequence[Effect]


# Headings of /help, in this order.
GROUPS = ("does it help?", "strategies", "drafting", "decoding", "prompts", "models", "results", "checks", "session")
# Names that no list shows, and the words that they stand for.
ALIASES = {
    "exit": "quit",
    "set_ngramstorage": "ngram kind",
    "top_k_filler": "ngram candidates",
    "ngram_limit": "ngram limit",
    "reset_in_between": "ngram reset",
}


@dataclass(frozen=True, slots=True)
class CommandContext:
    """What a command may read.

    `facts` describe the loaded models for /show. `page` makes an HTML page of what was shown.
    """

    settings: Settings
    registry: "Registry"
    harness: Harness
    limits: Limits = field(default_factory=Limits)
    facts: Callable[[], tuple[tuple[str, str], ...]] = lambda: ()
    pairs: Mapping[str, PairSpec] = field(default_factory=lambda: PAIRS)
    page: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command.

    `usage` is the argument as /help shows it, and `summary` has at most 39 characters. `rank` is its place on the first
    page of /help, from 1; commands with 0 are only on /help all. `syntax` has a row for each form, if the usage does
    not cover them, and `current` is the value of a setting. `words` complete the argument, and a file name does after a
    beginning in `files`. A command that runs `at_once` uses no models.
    """

    name: str
    usage: str
    summary: str
    run: Callable[[str, CommandContext], Outcome]
    group: str
    rank: int = 0
    about: str = ""
    example: tuple[str, ...] = ()
    syntax: tuple[str, ...] = ()
    current: Callable[[Settings], str] = lambda settings: ""
    words: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    at_once: bool = False

    @property
    def typed(self) -> str:
        return f"/{self.name} {self.usage}".strip()


def _parts(line: str) -> tuple[str, str]:
    """The name and the argument of a line that begins with a slash; "=" may stand between them."""
    # DOTALL, because an argument may have several lines. The pattern matches every line.
    match = re.fullmatch(r"/?([^\s=]*)\s*=?(.*)", line.lstrip(), re.DOTALL)
    assert match is not None
    name, _, words = ALIASES.get(match[1].lower(), match[1].lower()).partition(" ")
    return name, f"{words} {match[2]}".strip()


class Registry:
    """Commands by name."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands = {command.name: command for command in commands}

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def visible(self) -> list[Command]:
        """The commands as /help lists them: first its first page, then the others, both by group."""
        return sorted(self, key=lambda command: (not command.rank, GROUPS.index(command.group), command.rank))

    def run(self, line: str, context: CommandContext) -> Outcome:
        """Run a line that begins with a slash. Raises UserError for an unknown command or an invalid argument."""
        name, argument = _parts(line)
        command = self.find(name)
        if argument and not command.usage:
            raise UserError(f"/{command.name} takes no argument, but got '{argument}'.")
        with naming(f"/{command.name}"):
            return command.run(argument, context)

    def is_at_once(self, line: str) -> bool:
        """Whether a line that begins with a slash can run while another thread uses the models."""
        command = self._commands.get(_parts(line)[0])
        return command is not None and command.at_once

    def find(self, name: str) -> Command:
        """The command with this name or alias, in any case. Raises UserError with the nearest name otherwise."""
        name = name.lower()
        name = ALIASES[name].split()[0] if name in ALIASES else name
        if name in self._commands:
            return self._commands[name]
        if not name:
            raise UserError("Type the name of a command after the slash; /help lists them.")
        raise UserError(
            f"There is no command /{name}; {self._hint(name)}. "
            f"({QUOTES}TEXT{QUOTES} sends a text that begins with a slash.)"
        )

    def _hint(self, name: str) -> str:
        """The nearest name: the first one with the same beginning, otherwise the most similar one."""
        names = [*(command.name for command in self.visible()), *ALIASES]
        near = [known for known in names if len(name) > 1 and known.startswith(name)]
        near = near or get_close_matches(name, names, n=1, cutoff=0.5)
        return f"the nearest is /{ALIASES.get(near[0], near[0])}" if near else "/help lists the commands"


OVERWRITE = "overwrite"  # the word after a file name that permits replacing the file


def path_in(argument: str, example: str) -> Path:
    """The path in an argument. Raises UserError for an empty argument."""
    if not argument:
        raise UserError(f"give a file, for example: {example}")
    return parse_path(argument)


def output_in(argument: str, example: str) -> tuple[Path, bool]:
    """The file in `FILE` or `FILE overwrite`, the argument of a writing command, and whether it may be replaced."""
    name, _, last = argument.rpartition(" ")
    overwrite = last == OVERWRITE and bool(name.strip())
    return path_in(name.strip() if overwrite else argument, example), overwrite
