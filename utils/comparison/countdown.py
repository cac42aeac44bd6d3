"""Progress of long work with the time that is left, at most once a second."""

import time
from collections.abc import Callable, Iterator

from utils.comparison.reports import Progress

INTERVAL = 1.0  # seconds between two sentences


class Countdown:
    """Estimates the time left, counted from its creation. Tests replace the clocks."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._shown = clock()

    def at(self, fraction: float, text: str) -> Iterator[Progress]:
        """Yields a progress sentence for work that is done to this fraction (0 to 1), at most once per INTERVAL."""
        now = self._clock()
        if now - self._shown < INTERVAL:
            return
        self._shown = now
        left = f", about {(now - self._start) * (1 - fraction) / fraction:.0f} s left" if fraction else ""
        yield Progress(f"{text}{left} ...")
