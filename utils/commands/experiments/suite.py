"""/race N FILE and /suite FILE: run every prompt of a file with every enabled strategy, and report results by task.

Speed-ups are computed within each repeat of a prompt. Tokens, seconds and drafts are pooled, so that long answers weigh
more than short ones.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from utils.commands.experiments.repeated_runs import claim_of, one_by_one, rotated, then_findings
from utils.commands.experiments.suite_conclusion import suite_conclusion
from utils.commands.outcomes import Outcome, RunReport
from utils.commands.paths import path_in
from utils.commands.registry import CommandContext
from utils.comparison.charts import BASELINE, DotChart, repeats_chart
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent, shortened
from utils.comparison.speed_claims import Row, interval_text, speedup_text
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import warm_up
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.results import Comparison, Generation, compare, pooled
from utils.prompts.prompt_files import ALL_TASKS, Prompt, read_prompts
from utils.text import count_of

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
    """One prompt, numbered from 1, by one strategy, and how it compares with the target's own run of that repeat."""

    number: int
    task: str
    strategy: Strategy
    run: Generation
    comparison: Comparison


def suite(file: str, repeats: int, context: CommandContext) -> Outcome:
    """The report of /race N FILE and /suite FILE. Raises UserError for a file that cannot be used."""
    path = path_in(file, "/race prompts.jsonl")
    prompts, harness, settings = list(read_prompts(path)), context.harness, context.settings
    if not prompts:
        raise UserError(f"the prompts file {path} holds no prompt: write one per line.")
    events = _events(harness, settings, prompts, enabled=harness.enabled(settings), repeats=repeats)
    conclude = partial(suite_conclusion, harness, settings, len(prompts))
    title = f"/race {repeats} {path}: {count_of(len(prompts), 'prompt')}"
    report = Report(
        "suite", str(path), settings, HEADINGS, events, conclude, charts=_charts, optional=OPTIONAL, title=title
    )
    return [RunReport(report)]


def _charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-up of each prompt, of all prompts before those of each task."""
    rows = sorted((finding.figures for finding in findings), key=lambda row: bool(row["task"] != ALL_TASKS))
    several = len({row["task"] for row in rows}) > 1
    named = [(f"{row['strategy']}, {row['task']}" if several else row["strategy"], row) for row in rows]
    if not any(row["speedups_by_prompt"] for row in rows if row["strategy"] != BASELINE):
        return []
    return [repeats_chart(named, "run" if max(row["prompts"] for row in rows) == 1 else "prompt")]


def _events(
    harness: Harness,
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    enabled: Sequence[Strategy],
    repeats: int,
) -> Iterator[ReportEvent]:
    results: list[list[Result]] = []  # of each prompt that could be run, in each repeat
    places: dict[int, int] = {}  # of those prompts by number, in the order in which they ran
    notes: set[Note] = set()

    def run(index: int, numbered: tuple[int, Prompt]) -> Generator[ReportEvent, None, float | None]:
        number, prompt = numbered
        # Rotated by the prompts that ran, so a prompt that is refused does not skip a turn, and from repeat to repeat.
        order = rotated(enabled, places.get(number, len(places)) + index // len(prompts))
        runs, new = _runs(harness, number, prompt, order=order, settings=settings)
        yield from sorted(new - notes, key=lambda note: note.text)  # once, not in every repeat
        notes.update(new)
        if not runs:
            # No seconds: a refused prompt says nothing about how long the others take.
            return None
        places.setdefault(number, len(places))
        results.append(_results(number, prompt.task, enabled, runs))
        return sum(run.seconds for run in runs.values())

    names = ", ".join(strategy.name for strategy in enabled)
    yield Progress(
        f"warming up, then {count_of(len(prompts), 'prompt')} by {names}, {count_of(repeats, 'run')} each ..."
    )
    warm_up(harness, settings)
    # The prompts one after the other and then again, so that a machine that slows down affects all of them alike.
    items = list(enumerate(prompts, start=1)) * repeats
    yield from then_findings(
        one_by_one(items, lambda numbered: numbered[1].task, run),
        lambda: _findings([result for group in results for result in group], enabled, settings),
    )
    if not results:
        raise UserError("none of the prompts could be run.")


def _runs(
    harness: Harness, number: int, prompt: Prompt, *, order: Sequence[Strategy], settings: Settings
) -> tuple[dict[str, Generation], set[Note]]:
    """Runs by the strategy's name, and a sentence for each that could not be run."""
    try:
        ids = harness.prompt_ids(prompt.text, settings)
        # An unusable prompt is refused once, not by every strategy.
        ModelSession(harness.pair.target, use_cache=False).begin(ids)
    except UserError as error:
        return {}, {Note(f"Prompt {number} is left out. {error}")}
    runs: dict[str, Generation] = {}
    notes: set[Note] = set()
    for strategy in order:
        try:
            runs[strategy.name] = harness.run_alone(ids, strategy, settings)
        except UserError as error:
            notes.add(Note(f"{strategy.name}: prompt {number} is left out. {error}"))
    return runs, notes


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
        **_text_figures(group if strategy.lossless else ()),
    }


def _ratios(group: Sequence[Result]) -> list[list[float]]:
    """The speed-ups of each prompt in its repeats."""
    by_prompt: dict[int, list[float]] = {}
    for result in group:
        if result.comparison.speedup:
            by_prompt.setdefault(result.number, []).append(result.comparison.speedup)
    return list(by_prompt.values())


def _text_figures(group: Sequence[Result]) -> Row:
    """How many texts are the target's own in every repeat, and the prompts of those that are not."""
    same: dict[int, bool] = {}
    for result in group:
        if result.comparison.same is not None:
            same[result.number] = result.comparison.same and same.get(result.number, True)
    return {
        "compared_texts": len(same),
        "same_texts": sum(same.values()),
        "other_texts_at_prompts": [number for number, is_same in same.items() if not is_same],
    }


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
