"""The figures of a verdict: speeds, texts, tasks, how the candidate spent its time, what limits it, and what a better
drafter would gain.

All times are measured. The model is that of Leviathan et al. 2023, section 3.3: a round takes a decode step of the
target, the extra time of a wider verify pass, and the time of its drafts. Possible gains are computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean, median
from typing import Any

from utils.commands.experiments.arms import ArmRun, PairedRuns, pooled_totals
from utils.commands.experiments.predicted_speed import TargetTiming
from utils.commands.verdicts.measurement import Measurement
from utils.commands.verdicts.plan import PromptPlan
from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.speed_claims import NO_GAIN
from utils.comparison.text_relation import text_figures
from utils.config.setting_table import setting_fields
from utils.config.settings import Settings
from utils.metrics.benchmark_figures import Repeat
from utils.metrics.results import Generation, pooled
from utils.prompts.prompt_files import ALL_TASKS, Prompt

Row = dict[str, Any]
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


def run_figures(runs: Sequence[ArmRun]) -> Row:
    """The figures of all runs of one arm."""
    total = pooled_totals(runs)
    first = [run.first_seconds for run in runs if run.first_seconds is not None]
    rates = [(run.decode_tokens_per_second, run.totals.seconds - (run.first_seconds or 0.0)) for run in runs]
    later = [(rate, part) for rate, part in rates if rate is not None]
    seconds = sum(part for _, part in later)
    return {
        "runs": len(runs),
        "new_tokens": total.tokens,
        "seconds": total.seconds,
        "tokens_per_second": total.tokens_per_second,
        "decode_tokens_per_second": sum(rate * part for rate, part in later) / seconds if seconds > 0 else None,
        "first_token_seconds": median(first) if first else None,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_target_forward": total.tokens_per_forward,
    }


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
    runs = [run for pair in _in_order(measurement) for run in pair.theirs or ()]
    return {"strategy": measurement.baseline.name, "name": name, "speedup": 1.0, **run_figures(runs)}


def candidate_row(measurement: Measurement, plan: PromptPlan, settings: Settings) -> Row:
    """The figures that every candidate has. `settings` are the session's."""
    interval, pairs = measurement.interval(), _in_order(measurement)
    assert interval is not None
    runs = run_figures([run for pair in pairs for run in pair.ours])
    counted = {number: measurement.pairs[number] for number in sorted(measurement.pairs)}
    prompts = dict(enumerate(plan.measured, start=1))
    each = [_prompt_row(number, prompts[number], group) for number, group in counted.items()]
    tasks: dict[str, list[Row]] = {}
    for one in each:
        tasks.setdefault(str(one["task"]), []).append(one)
    return {
        "strategy": measurement.candidate.name,
        **runs,
        "speedup": interval.estimate,
        "speedups": [speedup for group in measurement.speedups for speedup in group],
        "speedups_by_prompt": measurement.speedups,
        "interval": [interval.low, interval.high] if interval.is_bounded else None,
        "verdict": interval.verdict,
        "without_gain": bool(runs["drafted"]) and (runs["tokens_per_target_forward"] or 1.0) < NO_GAIN,
        "prompts": len(each),
        "pairs": measurement.finished_pairs,
        "passes": measurement.passes,
        "interval_over": "repeats" if measurement.is_repeated or len(each) == 1 else "prompts",
        **text_figures((number, pair.same) for number, group in counted.items() for pair in group),
        "by_prompt": each,
        "tasks": {task: _task_figures(group) for task, group in tasks.items()},
        "conversations": sum(len(group[0].ours) > 1 for group in counted.values()),
        "benchmark": _benchmark_rows([(prompts[number], group) for number, group in counted.items()], plan.total),
        "divided": plan.divided,
        "source": plan.source,
        "left_out": plan.left_out,
        "turns": settings.keeps_conversation,
        "processor": setting_fields()["processor"].show(settings),
        "length": measurement.settings.length,
        "length_setting": settings.length,
    }


def _in_order(measurement: Measurement) -> list[PairedRuns]:
    return [pair for number in sorted(measurement.pairs) for pair in measurement.pairs[number]]


def generations(measurement: Measurement) -> list[tuple[Generation, Generation]]:
    """The local runs of each turn with the target's, because each turn of a conversation has its own prefill."""
    turns = (zip(pair.ours, pair.theirs or (), strict=False) for pair in _in_order(measurement))
    return [
        (ours.generation, theirs.generation)
        for pair in turns
        for ours, theirs in pair
        if ours.generation is not None and theirs.generation is not None
    ]


def _prompt_row(number: int, prompt: Prompt, pairs: Sequence[PairedRuns]) -> Row:
    """The figures of one prompt."""
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


def _benchmark_rows(groups: Sequence[tuple[Prompt, Sequence[PairedRuns]]], total: int) -> list[Row] | None:
    """The figures of each task and of all prompts by a benchmark's own definitions, or None without a benchmark."""
    sample = BenchmarkSample.chosen([prompt for prompt, _ in groups], total)
    if not sample.name:
        return None
    tasks = list(dict.fromkeys(prompt.task for prompt, _ in groups))
    rows = []
    for task in [*tasks, ALL_TASKS] if len(tasks) > 1 else tasks:
        chosen = [pairs for prompt, pairs in groups if task in (prompt.task, ALL_TASKS)]
        repeats: list[Repeat] = [
            [(pairs[one].totals, pairs[one].baseline_totals) for pairs in chosen if len(pairs) > one]
            for one in range(max(map(len, chosen)))
        ]
        drafted = sum(ours.drafted or 0 for repeat in repeats for ours, _ in repeat)
        strategy = groups[0][1][0].arm.name
        counts = {"prompts": len(chosen), "drafted": drafted}
        rows.append({"task": task, "strategy": strategy, **counts, "benchmark": sample.figures(repeats)})
    return rows


def _task_figures(group: Sequence[Row]) -> Row:
    means = [geometric(known) for one in group if (known := [speed for speed in one["speedups"] if speed])]
    return {
        "prompts": len(group),
        "speedup": geometric(means) if means else 1.0,
        "speedups": means,
        "accepted": sum(one["accepted"] or 0 for one in group),
    }


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return exp(mean(map(log, values)))
