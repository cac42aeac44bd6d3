"""Choose the number of CPU threads.

More threads stream weights faster, but every small matrix product has to synchronize all of them. Which number is
fastest depends on the model, the machine and its other load, so it is measured.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median

import torch

REPEATS, ENOUGH = 3, 1.0  # of each number; two if all take longer than these seconds
WORTHWHILE = 0.95  # more threads must take at most this share of the time of fewer threads

_AVAILABLE = torch.get_num_threads()  # at import: the number of cores, or OMP_NUM_THREADS


def available_threads() -> int:
    """Return the largest useful number of threads: the number of cores, or OMP_NUM_THREADS."""
    return _AVAILABLE


def requested_threads() -> int | None:
    """Return the number of threads that the environment asks for, if it does."""
    return _AVAILABLE if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ else None


def candidate_counts(available: int = _AVAILABLE) -> list[int]:
    """Return the numbers of threads to try: the powers of two, and all."""
    return sorted({*(2**power for power in range(available.bit_length())), available})


def step_seconds(
    step: Callable[[], object],
    counts: Sequence[int],
    use: Callable[[int], object] = torch.set_num_threads,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Return the median seconds of a step by number of threads. use: sets the number."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    # Numbers take turns, so that other load on the machine affects all of them alike. Every other round is reversed,
    # because a change of the number can be slow.
    spent = 0.0
    for repeat in range(REPEATS + 1):
        for count in counts if repeat % 2 else reversed(counts):
            use(count)
            if spent < ENOUGH:
                step()  # wakes the threads after a change
            start = clock()
            step()
            spent += clock() - start
            if repeat:  # the first round is a warm-up
                seconds[count].append(clock() - start)
        if repeat > 1 and spent > ENOUGH:
            break
    return {count: median(values) for count, values in seconds.items()}


def fewest(seconds: Mapping[int, float]) -> int:
    """Return the smallest number of threads that no larger number clearly beats."""
    best = min(seconds)
    for count in sorted(seconds)[1:]:
        if seconds[count] < WORTHWHILE * seconds[best]:
            best = count
    return best


def fastest_count(
    step: Callable[[], object], counts: Sequence[int], use: Callable[[int], object] = torch.set_num_threads
) -> int:
    """Return the smallest number of threads that no larger number clearly beats, and use it."""
    best = fewest(step_seconds(step, counts, use))
    use(best)
    return best


@contextmanager
def restored_on_error() -> Iterator[None]:
    """Set the number of threads back if the block fails or is interrupted."""
    before = torch.get_num_threads()
    try:
        yield
    except BaseException:  # Ctrl-C included
        torch.set_num_threads(before)
        raise
