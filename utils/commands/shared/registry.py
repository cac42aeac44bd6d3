"""What every command is made of: the command, what it may read, what it requests from the session, and the registry.

A command is a function of its argument and a CommandContext. It prints and changes nothing: it returns an Outcome, and
`utils.repl.repl_session` applies its effects in order, or it raises a UserError with one sentence. Every command that
writes follows one convention: `/save FILE` refuses a file that exists, and `/save FILE overwrite` replaces it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum, auto
from pathlib import Path
from typing import Any

from ngram_assisted import NGramStorage
from utils.comparison.harness import Harness
from utils.comparison.records import Finding, Report, ReportEvent
from utils.comparison.speed_claims import STAR
from utils.comparison.training import Training
from utils.config.settings import Settings
from utils.config.value_types import Limits
from utils.errors import UserError
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

    `facts` makes (name, value) pairs that describe the loaded models, for /show. `page` makes an
    HTML page of what was shown.
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

    `name` has no slash. `usage` is the argument as /help shows it, and `summary` has at most 39 characters. `group` is
    one of GROUPS. `rank` is its place on the first page of /help, from 1; commands with 0 are only on /help all.

    /help NAME shows `about`, a few sentences; `example`, a line to type and its output; `syntax`, a row for each form,
    if the usage does not cover them; `see_also`, commands and figures; and `current`, the value of a setting.

    `words` complete the argument; each has a description or an empty text. A file name completes the argument after a
    beginning in `files`. `free_text` is True if the argument may begin with "=". `at_once` is True if the command uses
    no models, so that it can run while another thread uses them.
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
    see_also: tuple[str, ...] = ()
    current: Callable[[Settings], str] = lambda settings: ""
    words: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    free_text: bool = False
    at_once: bool = False

    @property
    def typed(self) -> str:
        """The command with its argument, as /help shows it."""
        return f"/{self.name} {self.usage}".strip()


class CommandError(UserError):
    """A UserError that already names its command."""


def _parts(line: str) -> tuple[str, str, str]:
    """The name, the separator and the argument of a line that begins with a slash."""
    # DOTALL, because an argument may have several lines. The pattern matches every line.
    match = re.fullmatch(r"/?([^\s=]*)(=|\s|$)(.*)", line.lstrip(), re.DOTALL)
    assert match is not None
    name, separator, argument = match.groups()
    name, _, words = ALIASES.get(name.lower(), name.lower()).partition(" ")
    return name, separator, f"{words} {argument}" if words else argument


class Registry:
    """Commands by name."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands: dict[str, Command] = {}
        for command in commands:
            if command.name in self._commands:
                raise ValueError(f"There are two commands named {command.name}.")
            self._commands[command.name] = command

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def visible(self) -> list[Command]:
        """The commands as /help lists them: first its first page, then the others, both by group."""
        return sorted(self, key=lambda command: (not command.rank, GROUPS.index(command.group), command.rank))

    def run(self, line: str, context: CommandContext) -> Outcome:
        """Run a line that begins with a slash. Raises UserError for an unknown command or an invalid argument."""
        name, separator, argument = _parts(line)
        command = self.find(name)
        if separator != "=" and not command.free_text:
            argument = re.sub(r"^\s*=", "", argument)  # as in "/gamma = 3"
        if not command.usage and argument.strip():
            raise CommandError(f"/{command.name} takes no argument, but got '{argument.strip()}'.")
        try:
            return command.run(argument.strip(), context)
        except CommandError:
            raise
        except UserError as error:
            raise CommandError(f"/{command.name}: {error}") from error

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
            raise CommandError("Type the name of a command after the slash; /help lists them.")
        raise CommandError(
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


Row = Mapping[str, Any]  # the figures of a finding
NOTHING = "-"  # a cell without a value


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """One column. `shown` makes the cell from the figures of a row. A narrow screen drops the columns with a `drop`
    above 0, the smallest first.
    """

    heading: str
    shown: Callable[[Row], str]
    drop: int = 0


def figure(heading: str, key: str, form: str = "{}", *, scale: float = 1, drop: int = 0) -> ResultColumn:
    """A column that formats one figure, with a dash where the row has none. `scale` multiplies it first."""

    def shown(row: Row) -> str:
        value = row.get(key)
        return NOTHING if value is None else form.format(value if scale == 1 else value * scale)

    return ResultColumn(heading, shown, drop)


def marked(column: ResultColumn) -> ResultColumn:
    """The column with a mark in the rows of servers that had other requests."""
    return replace(column, shown=lambda row: column.shown(row) + STAR * any(row.get("other_tokens") or ()))


def rate_of(heading: str, part: str, whole: str, *, drop: int = 0) -> ResultColumn:
    """A column with the ratio of two counts, with a dash where there is nothing to count."""
    return ResultColumn(heading, lambda row: f"{row[part] / row[whole]:.3f}" if row[whole] else NOTHING, drop)


class ResultTable:
    """The columns of a report: `headings` and `optional` are those of the report."""

    def __init__(self, *columns: ResultColumn) -> None:
        self._columns = columns
        self.headings = tuple(column.heading for column in columns)
        dropped = sorted((column for column in columns if column.drop), key=lambda column: column.drop)
        self.optional = tuple(column.heading for column in dropped)

    def finding(self, figures: dict[str, Any]) -> Finding:
        """A row with its cells."""
        return Finding(tuple(column.shown(figures) for column in self._columns), figures)

    def report(
        self,
        name: str,
        prompt: str,
        settings: Settings,
        events: Iterator[ReportEvent],
        *,
        conclude: Callable[[Sequence[Finding]], list[str]],
        **options: Any,
    ) -> Report:
        """The report with this table of findings. The `options` are further fields of Report."""
        return Report(name, prompt, settings, self.headings, events, conclude, optional=self.optional, **options)


def figures_of(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The figures of findings."""
    return [finding.figures for finding in findings]


def grouped(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    """The rows by one of their figures."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups
