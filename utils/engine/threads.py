"""How many threads compute: as many as help.

More threads stream weights faster, but every small product waits for all of them. Which wins depends on the model, the machine and what
else runs on it, so it is tried.
"""

import os
import time
from collections.abc import Callable
from statistics import median

import torch

REPEATS = 3
WORTH = 0.95  # more threads must be this much faster to be taken

_AVAILABLE = torch.get_num_threads()  # as PyTorch found it: the cores, or OMP_NUM_THREADS


def available_threads() -> int:
    """The most threads that make sense: cores, or what OMP_NUM_THREADS says."""
    return _AVAILABLE


def given_threads() -> int | None:
    """What the user asked for in the environment, or None."""
    return _AVAILABLE if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ else None


def thread_counts() -> list[int]:
    """The numbers of threads that are tried: powers of two, and all."""
    return sorted({*(2**power for power in range(_AVAILABLE.bit_length()) if 2**power <= _AVAILABLE), _AVAILABLE})


def fastest(step: Callable[[], object], counts: list[int], clock: Callable[[], float] = time.perf_counter) -> int:
    """The fewest threads that no larger number beats clearly; `step` runs a few times with each, in turns. PyTorch is left set to it."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(REPEATS + 1):
        for count in counts:
            torch.set_num_threads(count)
            step()  # the first after a change wakes the threads
            began = clock()
            step()
            if repeat:  # the first round warms up
                seconds[count].append(clock() - began)
    best = counts[0]
    for count in counts[1:]:
        if median(seconds[count]) < WORTH * median(seconds[best]):
            best = count
    torch.set_num_threads(best)
    return best
