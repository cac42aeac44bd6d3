"""Predicts times of speculative runs for /why and /whatif.

Leviathan et al. 2023, section 3.3, with measured costs: a round of k drafts takes 1 + v(k) + c k decode steps, where
v(k) is the extra time of a verify pass with k drafts and c the time of one draft. The time of a decode step comes from
the target's own run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from utils.comparison.session_state import LastPrompt
from utils.decode.steps import Step
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.metrics.results import Generation
from utils.metrics.stopwatch import RoundTiming


@dataclass(frozen=True, slots=True)
class TargetTiming:
    """Seconds of the target's own run before its decode steps (mostly the prefill), and per decode step."""

    start: float
    step: float

    @classmethod
    def of(cls, run: Generation) -> Self:
        """Computed from the target's own run. Raises UserError if it has fewer than two tokens."""
        if len(run.steps) < 2 or run.first_seconds is None:
            raise UserError("the target's own run needs at least two tokens: send a prompt with a longer answer.")
        # The first step contains the prefill, so only the others are averaged.
        step = (run.seconds - run.first_seconds) / (len(run.steps) - 1)
        return cls(max(0.0, run.first_seconds - step), step)

    def alone(self, tokens: int) -> float:
        """Seconds for this many tokens without drafts."""
        return self.start + self.step * tokens

    def predict(self, steps: Sequence[Step], costs: Costs, drafting: float) -> float:
        """Seconds of these rounds, with `drafting` decode steps spent on all of their drafts."""
        verifying = sum(1 + costs.verify_cost(len(step.drafted)) for step in steps)
        return self.start + self.step * (drafting + verifying)


def target_run(last: LastPrompt) -> Generation:
    """The target's own run of the last prompt. Raises UserError if the target did not run."""
    if last.target is not None:
        return last.target
    if last.job.settings.target:
        raise UserError("the last prompt was interrupted before the target's own run: send it again.")
    raise UserError("the target's own run is needed: turn it on with /target on, and send a prompt.")


def drafting_cost(timings: Sequence[RoundTiming], costs: Costs, kind: str | None, prompt: int) -> float:
    """The drafting time of a run in decode steps: every draft at the cost of its drafter kind, and reading the prompt
    once for each kind.
    """
    readers = {timing.kind or kind for timing in timings if timing.drafts}
    reading = sum(costs.reading_cost(reader, prompt) for reader in readers)
    return reading + sum(timing.drafts * costs.draft_cost(timing.kind or kind) for timing in timings)


def costs_of_run(costs: Costs | None, prompt: int, tokens: int) -> Costs:
    """The costs in the middle of a run. Times grow linearly with the context, so these are the mean costs."""
    return (costs or Costs()).at(prompt + tokens // 2)
