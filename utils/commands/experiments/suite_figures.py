"""The rows of /race N FILE: the figures of each task and strategy, and their cells in the table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from utils.commands.experiments.repeated_runs import claim_of
from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.charts import BASELINE, DotChart, repeats_chart
from utils.comparison.reports import Finding, shortened
from utils.comparison.run_texts import text_figures
from utils.comparison.speed_claims import Row, interval_text, speedup_text
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.metrics.benchmark_figures import Repeat
from utils.metrics.results import Comparison, Generation, compare, pooled
from utils.prompts.prompt_files import ALL_TASKS

HEADINGS = (
    "task",
    "strategy",
    "prompts",
    "tokens/s",
    "speed-up",
    "95 % interval",
    "acceptance",
    "tokens/forward",
    "text",
)
OPTIONAL = ("prompts", "acceptance", "tokens/s")
SHOWN_TASK = 16  # characters of a task in the table


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt by one strategy, compared with the target's own run of that repeat.

    `number` is the prompt's number in the file, from 1, and `repeat` counts from 0. All turns of a conversation are one
    `run`.
    """

    number: int
    repeat: int
    task: str
    strategy: Strategy
    run: Generation
    target: Generation | None
    comparison: Comparison


def results_of(
    place: tuple[int, int], task: str, enabled: Sequence[Strategy], runs: dict[str, Generation]
) -> list[Result]:
    """The results of one prompt. `place` has its number and the repeat, `runs` are keyed by strategy name."""
    done = [(strategy, runs[strategy.name]) for strategy in enabled if strategy.name in runs]
    target = next((run for strategy, run in done if strategy.is_baseline), None)
    return [Result(*place, task, strategy, run, target, compare(run, target)) for strategy, run in done]


def findings_of(
    results: Sequence[Result], enabled: Sequence[Strategy], settings: Settings, sample: BenchmarkSample
) -> Iterator[Finding]:
    """A row for each task and strategy. If there are several tasks, a group for all prompts comes last."""
    tasks = list(dict.fromkeys(result.task for result in results))
    if len(tasks) > 1:
        # Prompts without a task have this name too, and their group must not appear twice.
        tasks = [*(task for task in tasks if task != ALL_TASKS), ALL_TASKS]
    for task in tasks:
        for strategy in enabled:
            group = [result for result in results if result.strategy is strategy and task in (result.task, ALL_TASKS)]
            if group:
                row = {**_figures(task, strategy, group, settings), "benchmark": sample.figures(_by_repeat(group))}
                yield Finding(_cells(row), row)


def _figures(task: str, strategy: Strategy, group: Sequence[Result], settings: Settings) -> dict[str, Any]:
    total, ratios = pooled(result.run for result in group), _ratios(group)
    return {
        "task": task,
        "strategy": strategy.name,
        "prompts": len({result.number for result in group}),
        "new_tokens": len(total.tokens),
        "seconds": total.seconds,
        "tokens_per_second": total.tokens_per_second,
        "speedups": [result.comparison.speedup for result in group],
        "speedups_by_prompt": ratios,
        **claim_of(strategy, ratios, total).figures,
        "drafted": total.drafted if strategy.drafts else None,
        "accepted": total.accepted if strategy.drafts else None,
        "acceptance_rate": total.acceptance_rate if strategy.drafts else None,
        "tokens_per_target_forward": total.tokens_per_target_forward if strategy.uses_target else None,
        "lossless": strategy.lossless,
        "must_be_the_targets": strategy.repeats_target(settings),
        **text_figures((result.number, result.comparison.same) for result in group if strategy.lossless),
    }


def _by_repeat(group: Sequence[Result]) -> list[Repeat]:
    """The runs of each repeat, with the target's runs."""
    repeats: dict[int, list[tuple[Generation, Generation | None]]] = {}
    for result in group:
        repeats.setdefault(result.repeat, []).append((result.run, result.target))
    return list(repeats.values())


def _ratios(group: Sequence[Result]) -> list[list[float]]:
    """The speed-ups of each prompt in its repeats."""
    by_prompt: dict[int, list[float]] = {}
    for result in group:
        if result.comparison.speedup:
            by_prompt.setdefault(result.number, []).append(result.comparison.speedup)
    return list(by_prompt.values())


def _cells(row: Row) -> tuple[str, ...]:
    def text(name: str, form: str) -> str:
        return "-" if row[name] is None else form.format(row[name])

    return (
        shortened(row["task"], SHOWN_TASK),
        row["strategy"],
        str(row["prompts"]),
        text("tokens_per_second", "{:.1f}"),
        speedup_text(row),
        interval_text(row["interval"]),
        text("acceptance_rate", "{:.3f}"),
        text("tokens_per_target_forward", "{:.2f}"),
        f"same {row['same_texts']}/{row['compared_texts']}" if row["compared_texts"] else "-",
    )


def charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-up of each prompt: all prompts first, then each task."""
    rows = sorted((finding.figures for finding in findings), key=lambda row: bool(row["task"] != ALL_TASKS))
    several = len({row["task"] for row in rows}) > 1
    named = [(f"{row['strategy']}, {row['task']}" if several else row["strategy"], row) for row in rows]
    if not any(row["speedups_by_prompt"] for row in rows if row["strategy"] != BASELINE):
        return []
    return [repeats_chart(named, "run" if max(row["prompts"] for row in rows) == 1 else "prompt")]
