"""Measures a candidate against its baseline, in turns, pass after pass over all prompts, until the answer is clear.

Both run with the same settings, each with a prefill of its own. The first place alternates over prompts and passes. The
turns of a conversation are run one after the other.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil

from utils.bounds import MAX_SEED
from utils.commands.experiments.paired_runs import PairedRuns, all_turns
from utils.commands.experiments.race_runs import MOST_FAILURES, RaceItem, RaceResult
from utils.commands.experiments.repeated_runs import rotated
from utils.comparison.arms import Arm, complete
from utils.comparison.reports import Note, Progress, ReportEvent
from utils.comparison.runs import Run
from utils.comparison.speed_claims import MIN_VALUES
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.intervals import Interval, speedup_interval
from utils.metrics.stopwatch import Clock
from utils.prompts.prompt_files import Prompt

SELECTION_SECONDS = 20.0  # no replay or trial begins after this, counted from the end of the warm-up
TOTAL_SECONDS = 150.0  # a further pass begins only if it ends before this
RUN_SECONDS = 4.5  # limit for a run by the target alone, which bounds its length
LENGTHS = (16, 32, 64, 128)
WANTED_PASSES = 6  # with few prompts, runs may take longer than RUN_SECONDS, as long as this many passes fit
ENOUGH_PROMPTS = 6  # a first pass with this many prompts may end early
LONGEST_SECONDS = 2 * TOTAL_SECONDS  # limit for a first pass with ENOUGH_PROMPTS
NARROW = 1.06  # an interval is narrow if the ratio of its ends is below this
MIN_PASSES = 2  # minimum for several prompts if the answer is for these prompts only
MOST_PASSES = 20
PROVISIONAL = 3  # prompts or repeats needed to show an interval
WARM_UP_TOKENS = 2
GONE = f"{MOST_FAILURES} prompts in a row have no answer, so the measurement ended here."
NONE_LEFT = "No prompt is left, so the measurement ended here."
NO_SPEEDUP = "no speed-up could be measured: {} or its baseline gives neither token ids nor usage figures."


@dataclass(frozen=True, slots=True)
class VerdictClock:
    """Measures the seconds since its start."""

    clock: Clock = time.monotonic
    began: float = field(default=0.0)

    @classmethod
    def start(cls) -> "VerdictClock":
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


@dataclass(slots=True)
class Measurement:
    """The runs so far. `pairs` has those of each pass by the prompt's number.

    `label` names the candidate. `divided` is True if the answer holds for other prompts of this kind, not only for
    these. `dropped` are prompts that cannot be run any more, and `problems` has a sentence for each of them.
    """

    candidate: Arm
    baseline: Arm
    label: str
    settings: Settings
    prompts: Mapping[int, Prompt]
    divided: bool
    clock: VerdictClock
    pairs: dict[int, list[PairedRuns]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    @property
    def finished_pairs(self) -> int:
        return sum(map(len, self.pairs.values()))

    @property
    def running(self) -> list[int]:
        """The numbers of the prompts that can still be run."""
        return [number for number in self.prompts if number not in self.dropped]

    @property
    def results(self) -> list[RaceResult]:
        """The finished pairs as results of the candidate, in the order of the prompts."""
        return [
            RaceResult(RaceItem(number, prompt, prompt.task, self.settings, (self.candidate,)), repeat, pair)
            for number, prompt in self.prompts.items()
            for repeat, pair in enumerate(self.pairs.get(number, ()))
        ]

    @property
    def is_repeated(self) -> bool:
        """Whether the answer holds for these prompts only, and each of them was repeated."""
        return not self.divided and min(map(len, self.pairs.values())) > 1

    @property
    def speedups(self) -> list[list[float]]:
        """The speed-ups of the repeats of each measured prompt."""
        groups = ([pair.speedup for pair in self.pairs[number]] for number in sorted(self.pairs))
        known = ([speedup for speedup in group if speedup] for group in groups)
        return [group for group in known if group]

    def interval(self) -> Interval | None:
        """The interval of the speed-ups so far, or None before the first one."""
        # An interval over prompts also holds for these prompts, but it is wider. It serves until all were repeated.
        return speedup_interval(self.speedups, these_prompts=self.is_repeated) if self.speedups else None

    def run(self) -> Iterator[ReportEvent]:
        """Run passes until the interval is narrow or the time is over. At least one pass is complete.

        Raises UserError if nothing can be measured.
        """
        began = self.clock.seconds
        for number in range(MOST_PASSES):
            failures = 0
            for place, index in enumerate(self.running):
                if not number and self._ends_first_pass():
                    return
                yield Progress(self._progress(number, place, began))
                problems = self._measure(index, number, place)
                yield from map(Note, problems)
                failures = failures + 1 if problems else 0
                if not self.running or (failures == MOST_FAILURES and self.candidate.strategy is None):
                    yield self._end(GONE if self.running else NONE_LEFT)
                    return
            if not self.speedups:
                raise UserError(NO_SPEEDUP.format(self.label))
            if self._is_enough(number + 1, began):
                return

    def _end(self, why: str) -> Note:
        """Why no further prompt is run. Raises UserError if nothing was measured."""
        if not self.pairs:
            raise UserError(f"none of the prompts could be measured. {self.problems[0]}")
        self.problems.append(why)
        return Note(why)

    def _ends_first_pass(self) -> bool:
        """Whether the first pass ends early because the machine is slow. It has covered one prompt of each task."""
        return len(self.pairs) >= ENOUGH_PROMPTS and self.clock.seconds > LONGEST_SECONDS

    def _is_enough(self, passes: int, began: float) -> bool:
        """Whether the measurement can end after this many passes, the first of which began at `began`."""
        interval, seconds = self.interval(), self.clock.seconds
        if interval is None or seconds + (seconds - began) / passes > TOTAL_SECONDS:
            return True
        # An answer needs MIN_VALUES speed-ups, however narrow an interval of fewer is.
        least = max(1 if self.divided else MIN_PASSES, ceil(MIN_VALUES / len(self.pairs)))
        return passes >= least and interval.high / max(interval.low, 1e-9) < NARROW

    def _measure(self, number: int, passed: int, place: int) -> list[str]:
        """Add a pair of runs of a prompt, or drop the prompt if it cannot be run. Returns the problems."""
        prompt = self.prompts[number]
        if not passed and self.candidate.strategy is not None:
            # The first prefill of a length may be slow, and must not count against the first run.
            with suppress(UserError):
                complete(self.candidate.run(prompt.text, replace(self.settings, length=WARM_UP_TOKENS)))
        # Each pass has other random numbers: repeats of a sampled text must show how much such texts differ.
        settings = replace(self.settings, seed=(self.settings.seed + 1 + passed) % (MAX_SEED + 1))
        runs: list[tuple[Arm, tuple[Run, ...]]] = []
        problems = []
        for arm in rotated((self.baseline, self.candidate), place + passed):
            try:
                runs.append((arm, all_turns(arm, prompt, settings)))
            except UserError as error:
                problems.append(f"{arm.name}: prompt {number} is left out. {error}")
        # Only complete pairs are added, so Ctrl-C cannot leave a single run.
        if problems:
            self.dropped.add(number)
            self.problems += problems
        else:
            self.pairs.setdefault(number, []).append(PairedRuns.of(self.candidate, runs, settings))
        return problems

    def _progress(self, number: int, place: int, began: float) -> str:
        """The current prompt, the interval so far, and an estimate of the remaining time."""
        prompts = len(self.running)
        again = f", pass {number + 1}" if number else ""
        where = f"prompt {place + 1} of {prompts}{again}" if prompts > 1 else f"repeat {number + 1}"
        parts = [*self._so_far(), f"{self.label}, {where}"]
        if self.finished_pairs:
            parts.insert(1, f"at most {self._seconds_left(prompts, began):.0f} s left")
        return " · ".join(parts)

    def _seconds_left(self, prompts: int, began: float) -> float:
        """Estimated seconds until the end of the last pass that fits into the time."""
        seconds = self.clock.seconds
        whole = prompts * (seconds - began) / self.finished_pairs
        passes = min(MOST_PASSES, max(1, int((TOTAL_SECONDS - began) / whole))) if whole else 1
        return max(1.0, passes * whole - (seconds - began))

    def _so_far(self) -> Sequence[str]:
        interval = self.interval()
        if interval is None:
            return ()
        enough = len(self.pairs) >= PROVISIONAL or (self.is_repeated and self.finished_pairs >= PROVISIONAL)
        shown = f" (95 % interval {interval.low:.2f} to {interval.high:.2f})" if enough and interval.is_bounded else ""
        return (f"{interval.estimate:.2f}x so far{shown}",)
