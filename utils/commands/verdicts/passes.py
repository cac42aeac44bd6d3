"""When a measurement is complete: passes are repeated until the interval is narrow or the time is over."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from utils.commands.verdicts.timing import TOTAL_SECONDS
from utils.comparison.speed_claims import MIN_VALUES
from utils.metrics.intervals import Interval, speedup_interval

ENOUGH_PROMPTS = 6  # a first pass with this many prompts may end early
LONGEST_SECONDS = 2 * TOTAL_SECONDS  # limit for a first pass with ENOUGH_PROMPTS
NARROW = 1.06  # an interval is narrow if the ratio of its ends is below this
MIN_PASSES = 2  # minimum for several prompts if the answer is for these prompts only
MOST_PASSES = 20


def interval_so_far(groups: Sequence[Sequence[float]], *, divided: bool) -> Interval | None:
    """The interval of the speed-ups of each prompt, or None before the first one.

    `divided` is True if the answer holds for other prompts of this kind, not only for these.
    """
    if not groups:
        return None
    # An interval over prompts also holds for these prompts, but it is wider. It serves until all were repeated.
    repeated = not divided and min(map(len, groups)) > 1
    return speedup_interval(groups, these_prompts=repeated)


def ends_first_pass(prompts: int, seconds: float) -> bool:
    """Whether a first pass may end early because the machine is slow. It has covered one prompt of each task."""
    return prompts >= ENOUGH_PROMPTS and seconds > LONGEST_SECONDS


@dataclass(frozen=True, slots=True)
class Passes:
    """The finished passes with their prompts, and whether the answer holds for other prompts too."""

    count: int
    prompts: int
    divided: bool

    def are_enough(self, interval: Interval | None, seconds: float, began: float) -> bool:
        """Whether the measurement can end at `seconds`. The first pass began at `began`."""
        if interval is None or seconds + (seconds - began) / self.count > TOTAL_SECONDS:
            return True
        # An answer needs MIN_VALUES speed-ups, however narrow an interval of fewer is.
        least = max(1 if self.divided else MIN_PASSES, ceil(MIN_VALUES / self.prompts))
        return self.count >= least and interval.high / max(interval.low, 1e-9) < NARROW
