"""The time that /verdict may take, and how long one run may be."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from utils.metrics.stopwatch import Clock

SELECTION_SECONDS = 20.0  # replays and trials begin only before this, counted from the end of the warm-up
TOTAL_SECONDS = 150.0  # a further pass begins only if it ends before this
RUN_SECONDS = 4.5  # of a run by the target alone, which bounds its length
LENGTHS = (16, 32, 64, 128)
WANTED_PASSES = 6  # over a few prompts, so that their runs may be longer than RUN_SECONDS


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Seconds since the start."""

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

    The fewer prompts, the longer: short runs leave out the end of an answer, which may be accepted less often.
    """
    return max(RUN_SECONDS, (TOTAL_SECONDS - 1.5 * SELECTION_SECONDS) / (2 * WANTED_PASSES * prompts))


def run_length(step: float, longest: int, *, seconds: float = RUN_SECONDS, lengths: Sequence[int] = LENGTHS) -> int:
    """New tokens of one run: the largest of a few lengths that the target generates in time, at most `longest`.

    step: seconds of a decode step.
    """
    fitting = [length for length in lengths if length * step <= seconds]
    return min(longest, fitting[-1] if fitting else lengths[0])
