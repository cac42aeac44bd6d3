"""Choose the number of CPU threads.

More threads stream weights faster, but every small matrix product has to synchronize all of them. Which number is
fastest depends on the model, the machine and its other load, so it is measured.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

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


def fewest(seconds: Mapping[int, float]) -> int:
    """Return the smallest number of threads that no larger number clearly beats."""
    best = min(seconds)
    for count in sorted(seconds)[1:]:
        if seconds[count] < WORTHWHILE * seconds[best]:
            best = count
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
