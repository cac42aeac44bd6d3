"""The figures of a verdict: how the candidate spent its time, what limits it, and what a better drafter would gain.

All times are measured. The model is that of Leviathan et al. 2023, section 3.3: a round takes a decode step of the
target, the extra time of a wider verify pass, and the time of its drafts. Possible gains are computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean, median
from typing import Any

from utils.commands.experiments.predicted_speed import TargetTiming
from utils.commands.experiments.repeated_runs import PairedRun
from utils.decode.steps import FinishReason
from utils.metrics.results import Generation, first_difference, pooled

MANY_DECLINED = 0.5  # share of rounds without drafts above which declining is the limit


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """How all runs of the candidate spent their seconds.

    `prefill` is the same as in the target's own runs. `steps` is one decode step of the target for each round, and
    `verifying` the extra time of verify passes. `other` is processors, noise and verification rules. `target` is the
    time of the target's runs.
    """

    prefill: float
    steps: float
    verifying: float
    drafting: float
    other: float
    target: float

    @classmethod
    def of(cls, pairs: Sequence[PairedRun]) -> "TimeSplit | None":
        """None if the target's answers are too short to time a decode step."""
        timed = [(pair.run, pair.target) for pair in pairs if pair.target and len(pair.target.steps) > 1]
        if not timed:
            return None
        prefill = steps = verifying = drafting = other = 0.0
        for run, target in timed:
            timing = TargetTiming.of(target)
            parts = run.timings
            inside = sum(part.verifying for part in parts)
            prefill += timing.start
            steps += timing.step * len(run.steps)
            verifying += inside - timing.start - timing.step * len(run.steps)
            drafting += sum(part.drafting for part in parts)
            other += sum(part.other for part in parts)
        return cls(prefill, steps, max(0.0, verifying), drafting, other, sum(target.seconds for _, target in timed))

    @property
    def total(self) -> float:
        return self.prefill + self.steps + self.verifying + self.drafting + self.other

    def figures(self) -> dict[str, float]:
        """Shares of the total time."""
        names = ("prefill", "steps", "verifying", "drafting", "other")
        return {name: getattr(self, name) / self.total if self.total else 0.0 for name in names}


def limits(split: TimeSplit, run: Generation, speedup: float) -> dict[str, float]:
    """The speed-up without each cause of lost time, by cause."""
    total, decoding = split.total, split.total - split.prefill
    accepted, drafts = 1 + run.accepted / len(run.steps), 1 + run.drafted / len(run.steps)
    causes = {
        "drafting": total - split.drafting,
        "verifying": total - split.verifying,
        "other": total - split.other,
        "rejection": split.prefill + decoding * accepted / drafts,
    }
    gains = {cause: speedup * total / max(left, 1e-9) for cause, left in causes.items()}
    # Without a prefill both runs would be faster, so this is the ratio of their decode times.
    target = split.target - split.prefill
    gains["prefill"] = speedup * (target / split.target) / (decoding / total) if split.target and decoding else speedup
    return gains


def with_better_drafter(split: TimeSplit, run: Generation, speedup: float) -> dict[str, float]:
    """The speed-up with the same drafts at half the cost, and with half the rejections at the same cost.

    Half the rejections: at every position of a round, the probability that a draft is rejected, given that all drafts
    before it are accepted, is halved.
    """
    rates = [accepted / tried if tried else 0.0 for accepted, tried in run.accepted_by_position]
    now = expected_tokens(rates, run)
    better = expected_tokens([(1 + rate) / 2 for rate in rates], run)
    total, decoding = split.total, split.total - split.prefill
    return {
        "twice_as_fast": speedup * total / max(total - split.drafting / 2, 1e-9),
        "twice_as_accurate": speedup * total / max(split.prefill + decoding * now / better, 1e-9),
    }


def expected_tokens(rates: Sequence[float], run: Generation) -> float:
    """Expected tokens per round by the acceptance rates of the positions: 1 + a1 + a1 a2 + ...

    With one rate a for all positions this is (1 - a^(g+1)) / (1 - a). It is averaged over the numbers of drafts.
    """
    reached, sums = 1.0, [1.0]
    for rate in rates:
        reached *= rate
        sums.append(sums[-1] + reached)
    return mean(sums[len(step.drafted)] for step in run.steps)


def run_figures(runs: Sequence[Generation]) -> dict[str, Any]:
    """The figures of all runs of one arm."""
    total = pooled(runs)
    first = [run.first_seconds for run in runs if run.first_seconds is not None]
    later = [(len(run.tokens) - len(run.steps[0].tokens), run.seconds - (run.first_seconds or 0.0)) for run in runs]
    tokens, seconds = sum(part for part, _ in later), sum(part for _, part in later)
    return {
        "runs": len(runs),
        "new_tokens": len(total.tokens),
        "seconds": total.seconds,
        "tokens_per_second": total.tokens_per_second,
        "decode_tokens_per_second": tokens / seconds if tokens and seconds > 0 else None,
        "first_token_seconds": median(first) if first else None,
        "tokens_per_target_forward": total.tokens_per_target_forward,
        "cut": sum(run.finish is FinishReason.LENGTH for run in runs),
    }


def draft_figures(pairs: Sequence[PairedRun], speedup: float) -> dict[str, Any]:
    """Drafts, costs, limits, and the gain from a better drafter."""
    run, split = pooled(pair.run for pair in pairs), TimeSplit.of(pairs)
    drafts = sum(part.drafts for pair in pairs for part in pair.run.timings)
    figures: dict[str, Any] = {
        "drafted": run.drafted,
        "accepted": run.accepted,
        "acceptance_rate": run.acceptance_rate,
        "rounds": len(run.steps),
        "declined_rounds": run.declined_rounds,
        "accepted_by_position": [list(position) for position in run.accepted_by_position],
    }
    if split is None or not split.steps:
        return figures | dict.fromkeys(("draft_cost", "verify_cost", "time", "limits", "better_drafter", "bottleneck"))
    step, gains = split.steps / len(run.steps), limits(split, run, speedup)
    return figures | {
        "draft_cost": split.drafting / drafts / step if drafts else None,
        "verify_cost": 1 + split.verifying / split.steps,
        "time": split.figures(),
        "limits": gains,
        "better_drafter": with_better_drafter(split, run, speedup),
        "bottleneck": bottleneck(run, gains),
    }


def bottleneck(run: Generation, gains: dict[str, float]) -> str:
    """The cause whose absence would gain the most, or "no drafts" if most rounds have no drafts."""
    if run.declined_rounds > MANY_DECLINED * len(run.steps):
        return "no drafts"
    return max(gains, key=gains.__getitem__)


def same_texts(pairs: Sequence[PairedRun]) -> bool:
    """Whether every run of a prompt has the target's own tokens."""
    return all(pair.target and first_difference(pair.run.tokens, pair.target.tokens) is None for pair in pairs)


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return exp(mean(map(log, values)))
