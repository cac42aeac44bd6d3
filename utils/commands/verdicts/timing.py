"""How long /verdict may take, and how long one run may be."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from utils.metrics.stopwatch import Clock

SELECTION_SECONDS = 20.0  # no replay or trial begins after this, counted from the end of the warm-up
TOTAL_SECONDS = 150.0  # a further pass begins only if it ends before this
RUN_SECONDS = 4.5  # limit for a run by the target alone, which bounds its length
LENGTHS = (16, 32, 64, 128)
WANTED_PASSES = 6  # with few prompts, runs may take longer than RUN_SECONDS, as long as this many passes fit


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Measures the seconds since its start."""

    clock: Clock = time.monotonic
    began: float = field(default=0.0)

    @classmethod
    def start(cls) -> "Stopwatch":
        return cls(time.monotonic, time.monotonic())

    @property
    def seconds(self) -> float:
        return self.clock() - self.began


def run_seconds(prompts: int) -> float:
    """How long a run by the target alone may take.

    Fewer prompts may run longer: short runs miss the end of an answer, where acceptance may be lower.
    """
    return max(RUN_SECONDS, (TOTAL_SECONDS - 1.5 * SELECTION_SECONDS) / (2 * WANTED_PASSES * prompts))


def run_length(step: float, longest: int, *, seconds: float = RUN_SECONDS, lengths: Sequence[int] = LENGTHS) -> int:
    """The number of new tokens of one run: the largest of a few lengths that fits into the time, at most `longest`.

    `step` is the time of a decode step in seconds.
    """
    fitting = [length for length in lengths if length * step <= seconds]
    return min(longest, fitting[-1] if fitting else lengths[0])
