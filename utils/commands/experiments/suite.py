"""/suite: runs every prompt of a file with every enabled strategy, and reports the results by task.

Speed-ups are computed within each prompt. Tokens, seconds and drafts are pooled, so that long answers weigh more than
short ones.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

from utils.commands.experiments.repeated_runs import one_by_one, rotated, then_findings
from utils.commands.outcomes import Outcome, RunReport
from utils.commands.paths import path_in
from utils.commands.registry import Command, CommandContext, Page
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Progress, Report, ReportEvent
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import warm_up
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.results import Comparison, Generation, compare, pooled
from utils.prompts.prompt_files import ALL_TASKS, Prompt, read_prompts

HEADINGS = (
    "task",
    "strategy",
    "prompts",
    "tokens/s",
    "speed-up",
    "lowest - highest",
    "acceptance",
    "per forward",
    "text",
)
Row = dict[str, Any]  # the figures of a finding


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt, numbered from 1, by one strategy, and how it compares with the target's own run of that prompt."""

    number: int
    task: str
    strategy: Strategy
    run: Generation
    comparison: Comparison


def _suite(argument: str, context: CommandContext) -> Outcome:
    path = path_in(argument, "/suite prompts.jsonl")
    prompts, harness, settings = list(read_prompts(path)), context.harness, context.settings
    if not prompts:
        raise UserError(f"the prompts file {path} holds no prompt: write one per line.")
    events = _events(harness, settings, harness.enabled(settings), prompts)
    conclude = partial(_conclusion, harness, settings, len(prompts))
    return [RunReport(Report("suite", str(path), settings, HEADINGS, events, conclude))]


def _events(
    harness: Harness, settings: Settings, enabled: Sequence[Strategy], prompts: Sequence[Prompt]
) -> Iterator[ReportEvent]:
    results: list[list[Result]] = []  # of each prompt that could be run

    def run(index: int, prompt: Prompt) -> Generator[ReportEvent, None, float | None]:
        # Rotated by the prompts that ran, so a prompt that is refused does not skip a turn.
        runs = yield from _runs(harness, prompt.text, rotated(enabled, len(results)), settings)
        if not runs:
            # No seconds: a refused prompt says nothing about how long the others take.
            return None
        results.append(_results(index + 1, prompt.task, enabled, runs))
        return sum(run.seconds for run in runs.values())

    yield Progress(f"warming up, then {len(prompts)} prompts by {', '.join(strategy.name for strategy in enabled)} ...")
    warm_up(harness, settings)
    events = one_by_one(prompts, lambda prompt: prompt.task, run)
    yield from then_findings(
        events, lambda: _findings([result for group in results for result in group], enabled, settings)
    )
    if not results:
        raise UserError("none of the prompts could be run.")


def _runs(
    harness: Harness, text: str, order: Sequence[Strategy], settings: Settings
) -> Generator[Progress, None, dict[str, Generation]]:
    """Runs by the strategy's name, and a sentence for each that could not be run."""
    runs: dict[str, Generation] = {}
    try:
        ids = harness.prompt_ids(text, settings)
        # An unusable prompt is refused once, not by every strategy.
        ModelSession(harness.pair.target, use_cache=False).begin(ids)
    except UserError as error:
        yield Progress(f"left out. {error}")
        return runs
    for strategy in order:
        try:
            runs[strategy.name] = harness.run_alone(ids, strategy, settings)
        except UserError as error:
            yield Progress(f"{strategy.name}: left out. {error}")
    return runs


def _results(number: int, task: str, enabled: Sequence[Strategy], runs: dict[str, Generation]) -> list[Result]:
    done = [(strategy, runs[strategy.name]) for strategy in enabled if strategy.name in runs]
    target = next((run for strategy, run in done if strategy.is_baseline), None)
    return [Result(number, task, strategy, run, compare(run, target)) for strategy, run in done]


def _findings(results: Sequence[Result], enabled: Sequence[Strategy], settings: Settings) -> Iterator[Finding]:
    """A row for each task and strategy. If there are several tasks, a group for all prompts comes last."""
    tasks = list(dict.fromkeys(result.task for result in results))
    if len(tasks) > 1:
        # Prompts that name no task have this one too, and their group must not appear twice.
        tasks = [*(task for task in tasks if task != ALL_TASKS), ALL_TASKS]
    for task in tasks:
        for strategy in enabled:
            group = [result for result in results if result.strategy is strategy and task in (result.task, ALL_TASKS)]
            if group:
                row = _figures(task, strategy, group, settings)
                yield Finding(_cells(row), row)


def _figures(task: str, strategy: Strategy, group: Sequence[Result], settings: Settings) -> Row:
    total, speedups = pooled(result.run for result in group), [result.comparison.speedup for result in group]
    known = list(filter(None, speedups))
    return {
        "task": task,
        "strategy": strategy.name,
        "prompts": len(group),
        "new_tokens": len(total.tokens),
        "seconds": total.seconds,
        "tokens_per_second": total.tokens_per_second,
        # Geometric, because ratios are averaged: twice as fast and half as fast cancel out.
        "speedup": geometric_mean(known) if known else None,
        "speedups": speedups,
        "drafted": total.drafted if strategy.drafts else None,
        "accepted": total.accepted if strategy.drafts else None,
        "acceptance_rate": total.acceptance_rate if strategy.drafts else None,
        "tokens_per_target_forward": total.tokens_per_target_forward if strategy.uses_target else None,
        "lossless": strategy.lossless,
        "must_be_the_targets": strategy.repeats_target(settings),
        **_text_figures(group if strategy.lossless else ()),
    }


def _text_figures(group: Sequence[Result]) -> Row:
    """How many texts are the target's own, and the prompts of those that are not."""
    same = {result.number: result.comparison.same for result in group if result.comparison.same is not None}
    return {
        "compared_texts": len(same),
        "same_texts": sum(same.values()),
        "other_texts_at_prompts": [number for number, is_same in same.items() if not is_same],
    }


def _cells(row: Row) -> tuple[str, ...]:
    def text(name: str, form: str) -> str:
        return "-" if row[name] is None else form.format(row[name])

    speedups = list(filter(None, row["speedups"]))
    return (
        row["task"],
        row["strategy"],
        str(row["prompts"]),
        text("tokens_per_second", "{:.1f}"),
        text("speedup", "{:.2f}x"),
        f"{min(speedups):.2f} - {max(speedups):.2f}" if speedups else "-",
        f"{row['accepted']}/{row['drafted']}{text('acceptance_rate', ' = {:.3f}')}" if row["drafted"] else "-",
        text("tokens_per_target_forward", "{:.2f}"),
        f"same {row['same_texts']} of {row['compared_texts']}" if row["compared_texts"] else "-",
    )


def _conclusion(harness: Harness, settings: Settings, prompts: int, findings: Sequence[Finding]) -> list[str]:
    tasks: dict[str, list[Row]] = {}
    for finding in findings:
        tasks.setdefault(finding.figures["task"], []).append(finding.figures)
    overall = list(tasks.values())[-1]  # all prompts, or the only task
    finished = max(row["prompts"] for row in overall)
    lines = [f"{finished} of {prompts} prompts were run."] if finished < prompts else []
    lines += [fastest(task, rows) for task, rows in tasks.items()]
    compared = [row for row in overall if row["compared_texts"] and row["strategy"] != harness.baseline.name]
    lines += _required_texts([row for row in compared if row["must_be_the_targets"]], harness)
    if free := [row["strategy"] for row in compared if not row["must_be_the_targets"]]:
        lines.append(
            f"{' and '.join(free)}: with sampling under /verify {settings.verify}, a text may differ from "
            "the target's. /verify coupled makes them the same."
        )
    return [*lines, "Speed-ups are geometric means over the prompts, with one run each. /race repeats one prompt."]


def fastest(task: str, rows: Sequence[Row]) -> str:
    """The fastest of the strategies that preserve the target's distribution."""
    lossless = [row for row in rows if row["lossless"]]
    if not lossless:
        return f"{task}: no enabled strategy preserves the target's distribution."
    if all(row["speedup"] is None for row in lossless):
        best = max(lossless, key=lambda row: float(row["tokens_per_second"] or 0))
        speed = best["tokens_per_second"] or 0
        return f"{task}: {best['strategy']} is the fastest, {speed:.1f} tokens/s. /target on adds speed-ups."
    best = max(lossless, key=lambda row: float(row["speedup"] or 0))
    if best["speedup"] <= 1:
        return f"{task}: nothing is faster than the target alone."
    faster = [speedup > 1 for speedup in best["speedups"] if speedup is not None]
    share = f"faster on {sum(faster)} of {len(faster)}"
    return f"{task}: {best['strategy']} is the fastest, {best['speedup']:.2f}x target-only, {share}."


def _required_texts(rows: Sequence[Row], harness: Harness) -> list[str]:
    """Whether the texts are the target's own where they are required to be."""
    same, compared = (sum(row[name] for row in rows) for name in ("same_texts", "compared_texts"))
    lines = [f"Texts that must equal the target's, and do: {same} of {compared}."] if compared else []
    if same < compared:
        others = "; ".join(
            f"{row['strategy']} at prompt {', '.join(map(str, row['other_texts_at_prompts']))}"
            for row in rows
            if row["other_texts_at_prompts"]
        )
        # Under a verified engine logits do not depend on the verify width, so rounding is no explanation.
        cause = (
            "this should not happen"
            if harness.pair.engine.state.verified
            else "this may be a rounding tie, since this engine does not guarantee equal bits"
        )
        lines.append(f"Texts that differ: {others}: {cause}. Send such a prompt, and /divergence explains it.")
    return lines


SUITE = Command(
    "suite",
    "FILE",
    "run every prompt of a file with every enabled strategy: speed-up, acceptance and texts by task",
    _suite,
    page=Page(
        "Run every prompt of a file with every strategy that is on: speed-up, acceptance and texts by task.",
        ("> /suite prompts.jsonl",),
    ),
    instead="race",
)
