"""When enough was measured: passes over all prompts are repeated until the interval is narrow or the time is over."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from utils.commands.experiments.verdict.timing import TOTAL_SECONDS
from utils.comparison.speed_claims import MIN_VALUES
from utils.metrics.intervals import Interval, speedup_interval

ENOUGH_PROMPTS = 6  # after which a first pass may end early
LONGEST_SECONDS = 2 * TOTAL_SECONDS  # of a first pass with as many prompts
NARROW = 1.06  # ratio of the ends of an interval that needs no further pass
MIN_PASSES = 2  # over several prompts that are not compared with others
MOST_PASSES = 20


def interval_so_far(groups: Sequence[Sequence[float]], *, divided: bool) -> Interval | None:
    """The interval of the speed-ups of each prompt, or None before the first one.

    divided: whether the answer is for prompts of this kind, and not only for these.
    """
    if not groups:
        return None
    # An interval over prompts also holds for these prompts, but is wider. It serves until all were repeated.
    repeated = not divided and min(map(len, groups)) > 1
    return speedup_interval(groups, these_prompts=repeated)


def ends_first_pass(prompts: int, seconds: float) -> bool:
    """Whether the first prompts, one of each task, must do, because the machine is slow."""
    return prompts >= ENOUGH_PROMPTS and seconds > LONGEST_SECONDS


@dataclass(frozen=True, slots=True)
class Passes:
    """The finished passes, the prompts of each, and whether the answer is for other prompts too."""

    count: int
    prompts: int
    divided: bool

    def are_enough(self, interval: Interval | None, seconds: float, began: float) -> bool:
        """seconds: now. began: when the first pass began."""
        if interval is None or seconds + (seconds - began) / self.count > TOTAL_SECONDS:
            return True
        # An answer needs MIN_VALUES speed-ups, however narrow the interval of fewer is.
        least = max(1 if self.divided else MIN_PASSES, ceil(MIN_VALUES / self.prompts))
        return self.count >= least and interval.high / max(interval.low, 1e-9) < NARROW
