"""The figures of a verdict: speeds, texts, tasks, how the candidate spent its time, what limits it, and what a better
drafter would gain.

All times are measured. The model is that of Leviathan et al. 2023, section 3.3: a round takes a decode step of the
target, the extra time of a wider verify pass, and the time of its drafts. Possible gains are computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from utils.commands.experiments.paired_runs import PairedRuns, pooled_totals
from utils.commands.experiments.predicted_speed import TargetTiming
from utils.commands.experiments.race_figures import race_row, race_rows
from utils.commands.verdicts.measurement import Measurement
from utils.commands.verdicts.plan import PromptPlan
from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.speed_claims import NO_GAIN
from utils.config.setting_table import setting_fields
from utils.config.settings import Settings
from utils.metrics.results import Generation, pooled
from utils.prompts.prompt_files import ALL_TASKS

Row = dict[str, Any]
TASK_FIGURES = (
    *("strategy", "prompts", "speedup", "interval", "verdict", "speedups", "speedups_by_prompt"),
    *("without_gain", "accepted"),
)
BENCHMARK_FIGURES = ("task", "strategy", "prompts", "drafted", "benchmark")
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
    def of(cls, pairs: Sequence[tuple[Generation, Generation]]) -> "TimeSplit | None":
        """None if the target's answers are too short to time a decode step."""
        timed = [(run, target) for run, target in pairs if len(target.steps) > 1]
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


def draft_figures(pairs: Sequence[tuple[Generation, Generation]], speedup: float) -> dict[str, Any]:
    """Drafts, costs, limits, and the gain from a better drafter."""
    run, split = pooled(ours for ours, _ in pairs), TimeSplit.of(pairs)
    drafts = sum(part.drafts for ours, _ in pairs for part in ours.timings)
    figures: dict[str, Any] = {
        "drafted": run.drafted,
        "accepted": run.accepted,
        "acceptance_rate": run.acceptance_rate,
        "rounds": len(run.steps),
        "drafts_per_round": run.drafts_per_round or 0.0,
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


def baseline_row(measurement: Measurement, name: str) -> Row:
    """The figures of the baseline. `name` is shown."""
    arm, settings = measurement.baseline, measurement.settings
    own = [
        replace(one, runs=PairedRuns.of(arm, [(arm, one.runs.theirs or ())], settings)) for one in measurement.results
    ]
    return {**race_row(ALL_TASKS, own), "name": name, "runs": len(own)}


def candidate_row(measurement: Measurement, plan: PromptPlan, settings: Settings) -> Row:
    """The figures that every candidate has. `settings` are the session's."""
    interval, results = measurement.interval(), measurement.results
    assert interval is not None
    sample = BenchmarkSample.chosen([one.item.prompt for one in results], plan.total)
    by_task = list(race_rows(results, [measurement.candidate], sample))
    whole = by_task[-1]
    repeated = measurement.is_repeated or whole["prompts"] == 1
    return {
        **whole,
        "speedup": interval.estimate,
        "interval": [interval.low, interval.high] if interval.is_bounded else None,
        "verdict": interval.verdict,
        "without_gain": bool(whole["drafted"]) and (whole["tokens_per_target_forward"] or 1.0) < NO_GAIN,
        "runs": sum(len(one.runs.ours) for one in results),
        "pairs": len(results),
        "passes": 1 + max(one.repeat for one in results),
        "interval_over": "repeats" if repeated else "prompts",
        "by_prompt": [_prompt_row(number, measurement) for number in sorted(measurement.pairs)],
        "tasks": {one["task"]: _task_figures(one) for one in by_task[:-1] or by_task if one["speedup"]},
        "conversations": len({one.item.number for one in results if len(one.runs.ours) > 1}),
        "benchmark": [{name: row[name] for name in BENCHMARK_FIGURES} for row in by_task] if sample.name else None,
        "divided": plan.divided,
        "source": plan.source,
        "left_out": plan.left_out,
        "turns": settings.keeps_conversation,
        "processor": setting_fields()["processor"].show(settings),
        "length": measurement.settings.length,
        "length_setting": settings.length,
    }


def _task_figures(row: Row) -> Row:
    return {name: row[name] for name in TASK_FIGURES} | {"accepted": row["accepted"] or 0}


def generations(measurement: Measurement) -> list[tuple[Generation, Generation]]:
    """The local runs of each turn with the target's, because each turn of a conversation has its own prefill."""
    turns = (zip(one.runs.ours, one.runs.theirs or (), strict=False) for one in measurement.results)
    return [
        (ours.generation, theirs.generation)
        for pair in turns
        for ours, theirs in pair
        if ours.generation is not None and theirs.generation is not None
    ]


def _prompt_row(number: int, measurement: Measurement) -> Row:
    """The figures of one prompt."""
    prompt, pairs = measurement.prompts[number], measurement.pairs[number]
    total = pooled_totals([run for pair in pairs for run in pair.ours])
    known = [pair.same for pair in pairs if pair.same is not None]
    baselines = [pair.baseline_totals for pair in pairs]
    return {
        "number": number,
        "task": prompt.task,
        "prompt": prompt.text,
        "speedups": [pair.speedup for pair in pairs],
        "tokens_per_second": [pair.totals.tokens_per_second for pair in pairs],
        "target_tokens_per_second": [one.tokens_per_second for one in baselines if one is not None],
        "same": all(known) if known else None,
        "accepted": total.accepted,
        "drafted": total.drafted,
    }
