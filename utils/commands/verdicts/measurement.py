"""Measures a candidate against the target alone, in turns, pass after pass over all prompts, until the answer is clear.

Both run with the same settings, each with a prefill of its own, after a short run of the same prompt that is not
counted. The first place alternates over prompts and passes. The turns of a conversation are run one after the other.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

from utils.bounds import MAX_SEED
from utils.commands.experiments.repeated_runs import PairedRun
from utils.commands.experiments.turn_runs import turn_runs
from utils.commands.verdicts.candidates import Candidate
from utils.commands.verdicts.passes import (
    MOST_PASSES,
    Passes,
    ends_first_pass,
    interval_so_far,
)
from utils.commands.verdicts.plan import ReadyPrompt
from utils.commands.verdicts.timing import TOTAL_SECONDS, Stopwatch
from utils.comparison.harness import Harness
from utils.comparison.reports import Progress
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.intervals import Interval
from utils.metrics.results import Generation
from utils.metrics.stopwatch import Stopwatch as RunStopwatch

PROVISIONAL = 3  # prompts or repeats needed to show an interval
WARM_UP_TOKENS = 2


@dataclass(slots=True)
class Measurement:
    """The runs so far. `pairs` has, by the prompt's index, the runs of the candidate and of the target in each pass.

    `divided` is True if the answer holds for other prompts of this kind, not only for these.
    """

    harness: Harness
    settings: Settings
    candidate: Candidate
    prompts: list[ReadyPrompt]
    divided: bool
    clock: Stopwatch
    pairs: dict[int, list[PairedRun]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def finished_pairs(self) -> int:
        return sum(map(len, self.pairs.values()))

    @property
    def speedups(self) -> list[list[float]]:
        """The speed-ups of the repeats of each measured prompt."""
        groups = ([pair.speedup for pair in self.pairs[index]] for index in sorted(self.pairs))
        known = ([speedup for speedup in group if speedup] for group in groups)
        return [group for group in known if group]

    def interval(self) -> Interval | None:
        """The interval of the speed-ups so far, or None before the first one."""
        return interval_so_far(self.speedups, divided=self.divided)

    def run(self) -> Generator[Progress, None, None]:
        """Run passes until the interval is narrow or the time is over. At least one pass is complete.

        Raises UserError if no prompt can be measured.
        """
        began = self.clock.seconds
        for number in range(MOST_PASSES):
            for place, index in enumerate(self._measurable()):
                if not number and ends_first_pass(len(self.pairs), self.clock.seconds):
                    return
                yield Progress(self._progress(number, place, began))
                self._measure(index, number)
            if not self._measurable():
                raise UserError(f"none of the prompts could be measured. {' '.join(self.problems[:1])}")
            passes = Passes(number + 1, len(self.pairs), self.divided)
            if passes.are_enough(self.interval(), self.clock.seconds, began):
                return

    def _measure(self, index: int, number: int) -> None:
        """Add a pair of runs of a prompt, or drop the prompt if it cannot be run."""
        prompt = self.prompts[index]
        try:
            self._run_pair(index, number)
        except UserError as error:
            self.problems.append(f"Prompt {prompt.number} was skipped: {error}")
            self.pairs.pop(index, None)
            self.prompts[index] = replace(prompt, ids=[])

    def _measurable(self) -> list[int]:
        return [index for index, prompt in enumerate(self.prompts) if prompt.ids]

    def _run_pair(self, index: int, number: int) -> None:
        ids, strategy = self.prompts[index].ids, self.candidate.strategy
        if not number:
            # The first prefill of a length may be slow, and must not count against the first run.
            self.harness.run_alone(ids, strategy, replace(self.settings, length=WARM_UP_TOKENS))
        # Each pass has other random numbers: repeats of a sampled text must show how much such texts differ.
        settings = replace(self.settings, seed=(self.settings.seed + 1 + number) % (MAX_SEED + 1))
        runs: dict[str, list[Generation]] = {}
        order = (strategy, self.harness.baseline) if (index + number) % 2 else (self.harness.baseline, strategy)
        for one in order:
            watch = RunStopwatch if one is strategy else lambda: None
            runs[one.name] = turn_runs(
                self.harness, self.prompts[index].prompt, one, settings, ids=ids, stopwatch=watch
            )
        # Only complete pairs are added, so Ctrl-C cannot leave a single run.
        pair = PairedRun.of_turns(runs[strategy.name], runs[self.harness.baseline.name])
        self.pairs.setdefault(index, []).append(pair)

    def _progress(self, number: int, place: int, began: float) -> str:
        """The current prompt, the interval so far, and an estimate of the remaining time."""
        prompts = len(self._measurable())
        again = f", pass {number + 1}" if number else ""
        where = f"prompt {place + 1} of {prompts}{again}" if prompts > 1 else f"repeat {number + 1}"
        parts = [*self._so_far(), f"{self.candidate.short_label(self.harness.pair)}, {where}"]
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
        repeated = not self.divided and min(map(len, self.pairs.values())) > 1
        enough = len(self.pairs) >= PROVISIONAL or (repeated and self.finished_pairs >= PROVISIONAL)
        shown = f" (95 % interval {interval.low:.2f} to {interval.high:.2f})" if enough and interval.is_bounded else ""
        return (f"{interval.estimate:.2f}x so far{shown}",)
