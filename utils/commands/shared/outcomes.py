"""What a command requests from the session: one small value for each kind of effect.

A command prints and changes nothing. It returns an Outcome, whose effects `utils.repl.repl_session` applies in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ngram_assisted import NGramStorage
from utils.comparison.reports import Report
from utils.config.settings import Settings
from utils.pairs.request import PairRequest
from utils.servers.address import ServerAddress


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
class UseStorage:
    """Use another n-gram storage from now on."""

    storage: NGramStorage


@dataclass(frozen=True, slots=True)
class UseServers:
    """Send every prompt to these servers from now on."""

    addresses: Sequence[ServerAddress]


@dataclass(frozen=True, slots=True)
class UsePair:
    """Load other models and use them from now on."""

    request: PairRequest


@dataclass(frozen=True, slots=True)
class RunLines:
    """Process these lines as if they were typed, one after the other."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunReport:
    """Run the models for a report, show it and record it."""

    report: Report


class Action(Enum):
    """An effect without values."""

    RETEST_ENGINE = auto()  # run the engine's self-test and all its measurements again
    UNDO_SETTINGS = auto()  # revert the last change of settings
    FORGET_CONVERSATIONS = auto()  # begin new conversations with the next prompt
    CLEAR_SCREEN = auto()
    QUIT = auto()  # end the session


Effect = Reply | ShowRows | ChangeSettings | UseStorage | UsePair | UseServers | RunLines | RunReport | Action
Outcome = Sequence[Effect]
