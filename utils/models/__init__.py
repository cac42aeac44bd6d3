"""From a name to one checkpoint in memory: sources, memory checks, loading, quantization and devices."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from utils.text import Count

Reporter = Callable[[str], None]  # shows one line of progress to the user
EVERY = 0.5  # seconds


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
