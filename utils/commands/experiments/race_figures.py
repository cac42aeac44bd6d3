"""The rows of races and sweeps: the figures of each group of prompts and arm, their table and their chart."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from utils.commands.experiments.paired_runs import pooled_totals
from utils.commands.experiments.race_runs import RaceItem, RaceResult
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure, figures_of, marked
from utils.comparison.arms import Arm
from utils.comparison.benchmark_tables import NO_SAMPLE, BenchmarkSample
from utils.comparison.charts import BASELINE, DotChart, repeats_chart
from utils.comparison.reports import Finding, shortened
from utils.comparison.run_texts import text_figures
from utils.comparison.speed_claims import SpeedClaim, interval_text, reasons_unknown, speedup_text
from utils.metrics.benchmark_figures import Repeat
from utils.prompts.prompt_files import ALL_TASKS

SHOWN_TASK = 16  # characters of a task in the table


def race_table(items: Sequence[RaceItem], *, servers: bool = False) -> ResultTable:
    """The columns of a race: of one prompt with its repeats, or of the prompts of a file with their texts."""
    several = len({item.number for item in items}) > 1
    tasks = len({item.group for item in items}) > 1
    both = servers or several
    columns = [
        (tasks, ResultColumn("task", lambda row: shortened(row["task"], SHOWN_TASK))),
        (True, figure("server" if servers else "strategy", "strategy")),
        (several and not servers, figure("prompts", "prompts", drop=1)),
        (several, marked(figure("tokens/s", "pooled_tokens_per_second", "{:.1f}", drop=0 if servers else 7))),
        (not several, marked(spread("tokens/s", "tokens_per_second", "{:.1f}"))),
        (not both, ResultColumn("range", lambda row: range_text(row["tokens_per_second"]), 5)),
        (not several or servers, spread("time to first token", "first_token_seconds", "{:.0f} ms", scale=1000, drop=4)),
        (not several or servers, spread("decoding", "decode_tokens_per_second", "{:.1f}", drop=3)),
        (True, ResultColumn("speed-up", speedup_text)),
        (True, ResultColumn("95 % interval", lambda row: interval_text(row["interval"]))),
        (both, figure("acceptance", "acceptance_rate", "{:.3f}", drop=6)),
        (both, figure("tokens/forward", "tokens_per_target_forward", "{:.2f}", drop=2 if servers else 0)),
        (both, ResultColumn("text", same_text)),
        (not both, figure("verdict", "verdict")),
    ]
    return ResultTable(*(column for shown, column in columns if shown))


def same_text(row: Row) -> str:
    """How many of the compared texts are the baseline's."""
    return f"same {row['same_texts']}/{row['compared_texts']}" if row["compared_texts"] else NOTHING


def spread(heading: str, key: str, form: str, *, scale: float = 1, drop: int = 0) -> ResultColumn:
    """A column with the median of a list of figures."""

    def shown(row: Row) -> str:
        known = [value for value in row[key] if value]
        return form.format(scale * median(known)) if known else NOTHING

    return ResultColumn(heading, shown, drop)


def range_text(values: Sequence[float]) -> str:
    """The lowest and the highest speed, without decimals from 100 on."""
    form = ".1f" if max(values) < 100 else ".0f"
    return f"{min(values):{form}}-{max(values):{form}}"


def race_rows(
    results: Sequence[RaceResult], arms: Sequence[Arm], sample: BenchmarkSample = NO_SAMPLE, *, overall: bool = True
) -> Iterator[dict[str, Any]]:
    """The figures of each group and arm. If there are several groups, one for all prompts comes last if `overall`."""
    groups = list(dict.fromkeys(result.item.group for result in results))
    if len(groups) > 1 and overall:
        # Prompts without a task have this name too, and their group must not appear twice.
        groups = [*(group for group in groups if group != ALL_TASKS), ALL_TASKS]
    for group in groups:
        whole = overall and group == ALL_TASKS
        for arm in arms:
            chosen = [one for one in results if one.runs.arm.name == arm.name and (whole or one.item.group == group)]
            if chosen:
                yield race_row(group, chosen, sample)


def race_row(task: str, group: Sequence[RaceResult], sample: BenchmarkSample = NO_SAMPLE) -> dict[str, Any]:
    """The figures of one arm."""
    arm, settings, first = group[0].runs.arm, group[0].item.settings, group[0].runs.ours[0]
    lossless = arm.strategy is None or arm.strategy.lossless
    runs = [run for result in group for run in result.runs.ours]
    total, groups = pooled_totals(runs), speedups_by_prompt(group)
    speeds = (result.runs.totals.tokens_per_second for result in group)
    # Only drafts can save forward passes, so tokens per forward mean nothing for other arms.
    drafts = arm.strategy.drafts if arm.strategy is not None else bool(total.drafted)
    forwards = total.tokens_per_forward if drafts else None
    return {
        "task": task,
        "strategy": arm.name,
        **({} if first.is_local else _server_figures(group)),
        "prompts": len({result.item.number for result in group}),
        "new_tokens": total.tokens,
        "seconds": total.seconds,
        "tokens_per_second": [speed for speed in speeds if speed is not None],
        "pooled_tokens_per_second": total.tokens_per_second,
        "first_token_seconds": [run.first_seconds for run in runs if run.first_seconds is not None],
        "decode_tokens_per_second": [
            run.decode_tokens_per_second for run in runs if run.decode_tokens_per_second is not None
        ],
        "speedups": [speedup for speedups in groups for speedup in speedups],
        "speedups_by_prompt": groups,
        "decode_speedups_by_prompt": _by_prompt((one.item.number, one.runs.decode_speedup) for one in group),
        **SpeedClaim.of(groups, baseline=first.name == first.baseline, tokens_per_forward=forwards).figures,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_target_forward": total.tokens_per_forward,
        "lossless": lossless,
        "must_be_the_targets": arm.strategy is not None and arm.strategy.repeats_target(settings),
        **text_figures((result.item.number, result.runs.same) for result in group if lossless),
        "benchmark": sample.figures(_by_repeat(group)),
    }


def _server_figures(group: Sequence[RaceResult]) -> dict[str, Any]:
    """The figures that only servers have: the baseline, and what else the server did meanwhile."""
    runs = [run for result in group for run in result.runs.ours]
    others = [run.other_tokens for result in group for run in result.runs.theirs or ()]
    return {
        "baseline": runs[0].baseline,
        "other_tokens": [run.other_tokens for run in runs],
        "disturbed": any(run.other_tokens for run in runs) or any(others),
        "acceptance_unknown": reasons_unknown(run.acceptance for run in runs),
    }


def speedups_by_prompt(group: Sequence[RaceResult]) -> list[list[float]]:
    """The speed-ups of each prompt in its repeats."""
    return _by_prompt((result.item.number, result.runs.speedup) for result in group)


def _by_prompt(values: Iterable[tuple[int, float | None]]) -> list[list[float]]:
    by_prompt: dict[int, list[float]] = {}
    for number, value in values:
        if value:
            by_prompt.setdefault(number, []).append(value)
    return list(by_prompt.values())


def _by_repeat(group: Sequence[RaceResult]) -> list[Repeat]:
    """The answers of each repeat, with the baseline's."""
    repeats: dict[int, list[Any]] = {}
    for result in group:
        repeats.setdefault(result.repeat, []).append((result.runs.totals, result.runs.baseline_totals))
    return list(repeats.values())


def race_charts(findings: Sequence[Finding], over: str = "target-only") -> list[DotChart]:
    """The speed-up of each prompt or repeat: all prompts first, then each task."""
    rows = sorted(figures_of(findings), key=lambda row: bool(row["task"] != ALL_TASKS))
    several = len({row["task"] for row in rows}) > 1
    named = [(f"{row['strategy']}, {row['task']}" if several else row["strategy"], row) for row in rows]
    one = max(row["prompts"] for row in rows) == 1
    if not one and not any(row["speedups_by_prompt"] for row in rows if row["strategy"] != BASELINE):
        return []
    return [repeats_chart(named, "run" if one else "prompt", over)]
