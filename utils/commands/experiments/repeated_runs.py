"""The order of repeated runs, their progress and the time that is left, and what Ctrl-C keeps."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from utils.comparison.reports import Finding, Progress, ReportEvent

Item = TypeVar("Item")


@dataclass(slots=True)
class RemainingTime:
    """Estimates the remaining time of a series from its finished part."""

    finished: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.finished += 1
        self.seconds += seconds

    def estimate(self, remaining: int) -> str:
        """The end of a progress sentence. It is empty until a part is finished."""
        return f", about {self.seconds / self.finished * remaining:.0f} s left" if self.finished else ""


def rotated(items: Sequence[Item], start: int) -> list[Item]:
    """All items in order, beginning at index `start` modulo their number."""
    return [items[(index + start) % len(items)] for index in range(len(items))]


def one_by_one(
    items: Sequence[Item],
    name: Callable[[Item], str],
    run: Callable[[int, Item], Generator[ReportEvent, None, float | None]],
) -> Iterator[ReportEvent]:
    """Run the items in order, with progress and the estimated time left.

    `run` takes an item and its index. It returns the seconds of its runs, or None if the item could not be run.
    """
    time = RemainingTime()
    for index, item in enumerate(items):
        left = time.estimate(len(items) - index)
        yield Progress(f"{index + 1} of {len(items)} ({name(item)}){left} ...")
        seconds = yield from run(index, item)
        if seconds is not None:
            time.add(seconds)


def then_findings(events: Iterator[ReportEvent], findings: Callable[[], Iterable[Finding]]) -> Iterator[ReportEvent]:
    """The events, followed by the findings of finished runs, even if Ctrl-C or an error ends the events."""
    try:
        yield from events
    finally:  # Ctrl-C is raised again once the findings are consumed
        yield from findings()
