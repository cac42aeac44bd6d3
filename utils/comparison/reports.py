"""Reports: the results of a command that runs models, as a stream of events.

Whoever consumes the events draws and records them. Closing the stream early keeps the findings that were already made.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from utils.comparison.charts import Chart
from utils.config.settings import Settings

SHOWN_PROMPT = 60  # characters of a prompt in a headline


@dataclass(frozen=True, slots=True)
class Progress:
    """A sentence about the work that is being done now."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that stays on the screen, for example about what was left out."""

    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a report: its cells for the screen, if it is shown there, and its figures for the JSON record."""

    cells: tuple[str, ...]
    figures: dict[str, Any]


ReportEvent = Progress | Note | Finding


@dataclass(frozen=True, slots=True)
class Column:
    """A text that is shown beside others. text: up to its first difference from the target's. other: the rest of it."""

    names: Sequence[str]  # strategies that produced it
    about: str  # the line below the names
    text: str
    other: str = ""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A further table of a report. note: what its headings mean, or ""."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def shortened(text: str, length: int = SHOWN_PROMPT) -> str:
    """A text on one line, cut to about this many characters."""
    words = " ".join(text[: 4 * length].split())
    return words if len(words) <= length and len(text) <= 4 * length else words[: length - 3].rstrip() + "..."


@dataclass(frozen=True, slots=True)
class Report:
    """A report that is yet to be computed: consuming `events` runs the models.

    name: its `record` field in JSON. headings: of the cells of a finding. conclude: makes sentences from all findings.
    attachment: one line of data to copy, or "". transposed: each finding is a column instead of a row, for few findings
    with many cells. optional: the headings of columns that a narrow screen lacks, the first ones first. title: replaces
    the headline, for reports that are not about the last prompt. tables: further ones, below that of the findings.
    """

    name: str
    prompt: str
    settings: Settings
    headings: tuple[str, ...]
    events: Iterator[ReportEvent]
    conclude: Callable[[Sequence[Finding]], list[str]]
    attachment: Callable[[Sequence[Finding]], str] = lambda findings: ""
    charts: Callable[[Sequence[Finding]], Sequence[Chart]] = lambda findings: ()
    tables: Callable[[Sequence[Finding]], Sequence[ReportTable]] = lambda findings: ()
    transposed: bool = False
    optional: tuple[str, ...] = ()
    title: str = ""

    @property
    def headline(self) -> str:
        """What was run: the command, and the prompt or file that it used."""
        return self.title or f'/{self.name} of "{shortened(self.prompt)}"'

    def concluded(self, findings: Sequence[Finding]) -> "Report":
        """The finished report. It holds its sentences and data, and releases what was needed to compute them."""
        lines, attached, charts = self.conclude(findings), self.attachment(findings), tuple(self.charts(findings))
        tables = tuple(self.tables(findings))
        return replace(
            self,
            events=iter(()),
            conclude=lambda findings: lines,
            attachment=lambda findings: attached,
            charts=lambda findings: charts,
            tables=lambda findings: tables,
        )
