"""The memory of a process and of its descendants, watched while they run."""

import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread

import psutil
from probes import memory_of

SAMPLE_SECONDS = 0.1  # between two looks at the memory of a process


@dataclass(frozen=True, slots=True)
class Bounds:
    """What ends a row: bytes of memory, and seconds. long_prefill: expected seconds above which it is left out."""

    memory: float
    seconds: float
    long_prefill: float


def resident(pid: int) -> int:
    """Bytes of resident memory of a process and of its descendants; 0 if it has ended."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_info().rss
    return total


def end_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (*root.children(recursive=True), root):
            with suppress(psutil.NoSuchProcess):
                process.kill()


class MemoryWatch:
    """A thread that samples the memory of a process tree, and kills it above a bound or after a time.

    peak: in bytes so far. stopped: why the tree was killed; otherwise empty.
    """

    def __init__(self, pid: int, bounds: Bounds) -> None:
        self.peak, self.stopped = 0, ""
        self._pid, self._bounds, self._started = pid, bounds, time.monotonic()
        self._end = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            # The system's own maximum of the process includes what happened between two samples.
            self.peak = max(self.peak, resident(self._pid), int(memory_of(self._pid).get("peak", 0)))
            if self.peak > self._bounds.memory:
                self.stopped = f"stopped at {self._bounds.memory / 1e9:.1f} GB"
            elif time.monotonic() - self._started > self._bounds.seconds:
                self.stopped = f"stopped after {self._bounds.seconds:.0f} s"
            if self.stopped:
                end_tree(self._pid)
                return
