"""Reports: what a command that runs models has to say, as it finds it out.

A report is an iterator of events that somebody else draws and records; closing it early keeps what it found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from utils.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Progress:
    """A sentence about what is being done now."""

    text: str


def time_left(spent: float, done: int, total: int) -> str:
    """How long the rest will take where `done` of `total` took `spent` seconds; nothing before there is one."""
    return f", about {spent / done * (total - done):.0f} s left" if done else ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: its cells for the screen, its figures for the record."""

    cells: tuple[str, ...]
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A text to be shown beside others: who said it, a line about it, the text, and of it what comes behind the first difference."""

    names: Sequence[str]
    about: str
    text: str
    other: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the same places. series: values by name, None where there is none. ticks: what the places are. below: of the axis."""

    series: Mapping[str, Sequence[float | None]]
    title: str
    below: str
    ticks: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """name: as in the records. prompt, settings: what it is about. headings: of the findings' cells. conclude: sentences from the findings.

    attachment: a line of data to copy, "" for none. chart: of the findings, where they have one.

    upright: findings stand side by side, a column each; for few of them with many cells.
    """

    name: str
    prompt: str
    settings: Settings
    headings: tuple[str, ...]
    events: Iterator[Progress | Finding]
    conclude: Callable[[Sequence[Finding]], list[str]]
    attachment: Callable[[Sequence[Finding]], str] = lambda findings: ""
    chart: Callable[[Sequence[Finding]], Chart | None] = lambda findings: None
    upright: bool = False

    def concluded(self, findings: Sequence[Finding]) -> "Report":
        """The same with its last word said, and nothing held that it would need for another."""
        lines, attached = self.conclude(findings), self.attachment(findings)
        return replace(self, events=iter(()), conclude=lambda findings: lines, attachment=lambda findings: attached)
