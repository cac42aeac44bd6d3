"""Reports: the results of a command that runs models, as a stream of events.

The consumer of the events draws and records them. Closing the stream early keeps the findings made until then.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from utils.config.settings import Settings

SHOWN_PROMPT = 60  # characters of a prompt in a headline
INTERVAL = 1.0  # seconds between two sentences on progress


@dataclass(frozen=True, slots=True)
class Progress:
    """A sentence about the current work."""

    text: str


class Countdown:
    """Progress of long work with the time that is left, counted from its creation. Tests replace the clocks."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._shown = clock()

    def at(self, fraction: float, text: str) -> Iterator[Progress]:
        """Yields a progress sentence for work that is done to this fraction (0 to 1), at most once per INTERVAL."""
        now = self._clock()
        if now - self._shown < INTERVAL:
            return
        self._shown = now
        yield self.progress(fraction, text)

    def progress(self, fraction: float, text: str) -> Progress:
        """The sentence for work that is done to this fraction."""
        seconds = self._clock() - self._start
        left = f", about {seconds * (1 - fraction) / fraction:.0f} s left" if fraction else ""
        return Progress(f"{text}{left} ...")


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that stays on the screen, for example about skipped prompts."""

    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a report: its cells, if it is shown on the screen, and its figures for the JSON record."""

    cells: tuple[str, ...]
    figures: dict[str, Any]


ReportEvent = Progress | Note | Finding


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A further table of a report. `note` explains its headings, or is empty."""

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
    """A report that is computed while its `events` are consumed.

    `name` is the `record` field in JSON, and `title` replaces the headline where a report is not about the last prompt.
    `conclude` turns all findings into sentences. `attachment` is one line of data to copy, or empty. `transposed` makes
    each finding a column, for few findings with many cells. Columns in `optional` are dropped on a narrow screen, the
    first one first. `tables` are shown below the table of findings. `details` are further records for scripts.
    """

    name: str
    prompt: str
    settings: Settings
    headings: tuple[str, ...]
    events: Iterator[ReportEvent]
    conclude: Callable[[Sequence[Finding]], list[str]]
    attachment: Callable[[Sequence[Finding]], str] = lambda findings: ""
    tables: Callable[[Sequence[Finding]], Sequence[ReportTable]] = lambda findings: ()
    transposed: bool = False
    optional: tuple[str, ...] = ()
    title: str = ""
    details: Callable[[], Sequence[dict[str, Any]]] = lambda: ()

    @property
    def headline(self) -> str:
        """The command that ran, and its prompt or file."""
        return self.title or f'/{self.name} of "{shortened(self.prompt)}"'
