"""The figures of a verdict, for its record and its sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from utils.commands.experiments.repeated_runs import PairedRun
from utils.commands.verdicts.analysis import draft_figures, geometric, run_figures, same_texts
from utils.commands.verdicts.candidates import best_of_each, kind_name
from utils.commands.verdicts.measurement import Measurement
from utils.commands.verdicts.plan import PromptPlan
from utils.commands.verdicts.selection import Selection
from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.harness import Harness
from utils.comparison.speed_claims import NO_GAIN
from utils.config.setting_table import setting_fields
from utils.config.settings import Settings
from utils.prompts.prompt_files import ALL_TASKS

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """Finished or interrupted measurements. `settings` are the session's, and `skipped` has a sentence for each skipped
    prompt.
    """

    harness: Harness
    settings: Settings
    plan: PromptPlan
    selection: Selection
    measurement: Measurement
    skipped: tuple[str, ...]

    def target_row(self) -> Row:
        """The target alone."""
        runs = [pair.target for pair in self._pairs() if pair.target]
        return {"strategy": self.harness.baseline.name, "name": "target-only", "speedup": 1.0, **run_figures(runs)}

    def _pairs(self) -> list[PairedRun]:
        """The runs of each turn, because each turn of a conversation has its own prefill."""
        pairs = self.measurement.pairs
        return [turn for index in sorted(pairs) for pair in pairs[index] for turn in pair.each]

    def candidate_row(self) -> Row:
        measurement, pair = self.measurement, self.harness.pair
        candidate, interval = measurement.candidate, measurement.interval()
        assert interval is not None
        strategy, kind = candidate.strategy, candidate.strategy.kind
        assert kind is not None
        drafts = draft_figures(self._pairs(), interval.estimate)
        runs = run_figures([pair.run for pair in self._pairs()])
        return {
            "strategy": strategy.name,
            "name": candidate.short_label(pair),
            "candidate": candidate.label(pair),
            **candidate.figures(pair),
            **runs,
            **drafts,
            "drafts_per_round": drafts["drafted"] / drafts["rounds"] if drafts["rounds"] else 0.0,
            "speedup": interval.estimate,
            "interval": [interval.low, interval.high] if interval.is_bounded else None,
            "verdict": interval.verdict,
            "without_gain": (runs["tokens_per_target_forward"] or 1.0) < NO_GAIN,
            "extra_memory": (pair.drafter_memory or 0) if kind.uses_loaded else 0,
            **self._prompt_figures(),
            **self._circumstances(),
            **self._selection_figures(),
        }

    def _prompt_figures(self) -> Row:
        """Figures of single prompts, and counts over them."""
        measurement = self.measurement
        numbered = [(measurement.prompts[index], measurement.pairs[index]) for index in sorted(measurement.pairs)]
        each = [
            {
                "number": ready.number,
                "task": ready.prompt.task,
                "prompt": ready.prompt.text,
                "speedups": [pair.speedup for pair in pairs],
                "tokens_per_second": [pair.tokens_per_second for pair in pairs],
                "target_tokens_per_second": [pair.target.tokens_per_second for pair in pairs if pair.target],
                "same": same_texts(pairs),
                "accepted": sum(pair.run.accepted for pair in pairs),
                "drafted": sum(pair.run.drafted for pair in pairs),
            }
            for ready, pairs in numbered
        ]
        tasks: dict[str, list[Row]] = {}
        for one in each:
            tasks.setdefault(str(one["task"]), []).append(one)
        repeated = not self.plan.divided and min(len(pairs) for _, pairs in numbered) > 1
        return {
            "prompts": len(each),
            "pairs": measurement.finished_pairs,
            "passes": max(len(pairs) for _, pairs in numbered),
            "interval_over": "repeats" if repeated or len(each) == 1 else "prompts",
            "same_texts": sum(one["same"] for one in each),
            "by_prompt": each,
            "tasks": {task: _task_figures(group) for task, group in tasks.items()},
            "conversations": sum(bool(pairs[0].turns) for _, pairs in numbered),
            "benchmark": self._benchmark_rows(),
        }

    def _benchmark_rows(self) -> list[Row] | None:
        """The figures of each task and of all prompts by a benchmark's own definitions, or None without a benchmark."""
        measurement = self.measurement
        groups = [(measurement.prompts[index].prompt, measurement.pairs[index]) for index in sorted(measurement.pairs)]
        sample = BenchmarkSample.chosen([prompt for prompt, _ in groups], self.plan.total)
        if not sample.name:
            return None
        tasks = list(dict.fromkeys(prompt.task for prompt, _ in groups))
        rows = []
        for task in [*tasks, ALL_TASKS] if len(tasks) > 1 else tasks:
            chosen = [pairs for prompt, pairs in groups if task in (prompt.task, ALL_TASKS)]
            passes = range(max(map(len, chosen)))
            repeats = [[(pairs[one].run, pairs[one].target) for pairs in chosen if len(pairs) > one] for one in passes]
            drafted = sum(run.drafted for repeat in repeats for run, _ in repeat)
            counts = {"prompts": len(chosen), "drafted": drafted}
            name = measurement.candidate.strategy.drafter_label(self.harness.pair)
            rows.append({"task": task, "strategy": name, **counts, "benchmark": sample.figures(repeats)})
        return rows

    def _circumstances(self) -> Row:
        measurement = self.measurement
        strategy, settings = measurement.candidate.strategy, self.settings
        return {
            "divided": self.plan.divided,
            "source": self.plan.source,
            "left_out": self.plan.left_out,
            "must_be_the_targets": strategy.repeats_target(settings),
            "engine_verified": self.harness.pair.engine.state.verified,
            "verify": settings.verify,
            "turns": settings.keeps_conversation,
            "processor": setting_fields()["processor"].show(settings),
            "length": measurement.settings.length,
            "length_setting": settings.length,
        }

    def _selection_figures(self) -> Row:
        selection, measurement, pair = self.selection, self.measurement, self.harness.pair
        considered = [
            {"name": kind_name(one.strategy, pair), **one.figures(pair)}
            for one in best_of_each(selection.candidates(), pair)
        ]
        return {
            "kind_name": kind_name(measurement.candidate.strategy, pair),
            "commands": list(measurement.candidate.commands(self.settings)),
            "in_use": measurement.candidate.is_used_by(self.settings),
            "best_fixed_gamma": selection.best_fixed_gamma(measurement.candidate.strategy),
            "considered": considered,
            "tried": [kind_name(one.strategy, pair) for one in selection.tried],
            "trials": len(selection.speeds),
            "not_tried": selection.not_replayed(),
            "skipped": [*self.skipped, *measurement.problems, *selection.cannot_draft()],
        }


def _task_figures(group: Sequence[Row]) -> Row:
    means = [geometric(known) for one in group if (known := [speed for speed in one["speedups"] if speed])]
    return {
        "prompts": len(group),
        "speedup": geometric(means) if means else 1.0,
        "speedups": means,
        "accepted": sum(one["accepted"] for one in group),
    }
