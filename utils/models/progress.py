"""How far a slow step of loading has got, told through the same function as its messages.

A screen shows a Count on a line that the next one replaces; where lines cannot be replaced it drops it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from utils.models import Reporter

EVERY = 0.5  # seconds


class Count(str):
    """A message that only says how far the step has got that the last message began."""


@contextmanager
def counted_seconds(report: Reporter, what: str) -> Iterator[None]:
    """Report every half second how long the block has been running."""
    ended, start = Event(), time.monotonic()

    def count() -> None:
        while not ended.wait(EVERY):
            report(Count(f"{what}: {time.monotonic() - start:.0f} s"))

    thread = Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
