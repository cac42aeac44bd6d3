"""/suite: every prompt of a file by every strategy that is on, told by task.

Each run has a storage of its own, and the first strategy of a prompt is another from prompt to prompt, as in /race. Speed-ups are taken
within a prompt; tokens, seconds and drafts are pooled, so that long answers weigh more than short ones.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

from utils.commands.experiments.race import in_turns
from utils.commands.paths import path_in
from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Bench, run_alone
from utils.comparison.reports import Finding, Progress, Report, time_left
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import warm_up
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.results import Comparison, Generation, compare, pooled
from utils.prompts.prompt_files import EVERY, Prompt, read_prompts

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


@dataclass(frozen=True, slots=True)
class Result:
    """A prompt, counted from 1, by one strategy, and how it compares with the target's run of it."""

    place: int
    task: str
    strategy: Strategy
    run: Generation
    comparison: Comparison


def _suite(argument: str, situation: Situation) -> Outcome:
    path = path_in(argument, "/suite prompts.jsonl")
    prompts, bench, settings = list(read_prompts(path)), situation.bench, situation.settings
    if not prompts:
        raise UserError(f"the prompts file {path} holds no prompt: write one a line.")
    events = _events(bench, settings, bench.enabled(settings), prompts)
    conclude = partial(_conclusion, bench, settings, len(prompts))
    return Outcome(report=Report("suite", str(path), settings, HEADINGS, events, conclude))


def _events(
    bench: Bench, settings: Settings, chosen: Sequence[Strategy], prompts: Sequence[Prompt]
) -> Iterator[Progress | Finding]:
    results: list[Result] = []
    yield Progress(f"warming up, then {len(prompts)} prompts by {', '.join(strategy.name for strategy in chosen)} ...")
    warm_up(bench, settings)
    spent, ran = 0.0, 0
    try:
        for place, prompt in enumerate(prompts):
            left = time_left(spent, ran, ran + len(prompts) - place)
            yield Progress(f"{place + 1} of {len(prompts)} ({prompt.task}){left} ...")
            runs = yield from _runs(bench, prompt.text, in_turns(chosen, ran), settings)
            results += _results(place + 1, prompt.task, chosen, runs)
            spent, ran = spent + sum(run.seconds for run in runs.values()), ran + bool(runs)
    finally:  # Ctrl-C goes on once this has been taken
        yield from _findings(results, chosen, settings)
    if not results:
        raise UserError("none of the prompts could be run.")


def _runs(
    bench: Bench, text: str, order: Sequence[Strategy], settings: Settings
) -> Generator[Progress, None, dict[str, Generation]]:
    """Runs by the strategy's name; a word for each that could not be had."""
    runs: dict[str, Generation] = {}
    try:
        ids = bench.ids(text, settings)
        ModelSession(bench.pair.target, use_cache=False).begin(
            ids
        )  # an unusable prompt is refused once, not by every strategy
    except UserError as error:
        yield Progress(f"left out. {error}")
        return runs
    for strategy in order:
        try:
            runs[strategy.name] = run_alone(bench, ids, strategy, settings)
        except UserError as error:
            yield Progress(f"{strategy.name}: left out. {error}")
    return runs


def _results(place: int, task: str, chosen: Sequence[Strategy], runs: dict[str, Generation]) -> list[Result]:
    done = [(strategy, runs[strategy.name]) for strategy in chosen if strategy.name in runs]
    target = next((run for strategy, run in done if strategy.is_baseline), None)
    return [Result(place, task, strategy, run, compare(run, target)) for strategy, run in done]


def _findings(results: Sequence[Result], chosen: Sequence[Strategy], settings: Settings) -> Iterator[Finding]:
    """A row for each task and strategy; with several tasks a group for all of them at the end."""
    tasks = list(dict.fromkeys(result.task for result in results))
    if len(tasks) > 1:
        tasks = [*(task for task in tasks if task != EVERY), EVERY]
    for task in tasks:
        for strategy in chosen:
            part = [result for result in results if result.strategy is strategy and task in (result.task, EVERY)]
            if part:
                yield _finding(task, strategy, part, settings)


def _finding(task: str, strategy: Strategy, part: Sequence[Result], settings: Settings) -> Finding:
    total, ups = pooled(result.run for result in part), [up for result in part if (up := result.comparison.speedup)]
    texts = {
        result.place: result.comparison.same
        for result in part
        if strategy.lossless and result.comparison.same is not None
    }
    figures: dict[str, Any] = {
        "task": task,
        "strategy": strategy.name,
        "prompts": len(part),
        "new_tokens": len(total.tokens),
        "seconds": total.seconds,
        "tokens_per_second": total.tokens_per_second,
        "speedup": geometric_mean(ups) if ups else None,
        "speedups": [result.comparison.speedup for result in part],
        "drafted": total.drafted if strategy.drafts else None,
        "accepted": total.accepted if strategy.drafts else None,
        "acceptance_rate": total.acceptance_rate if strategy.drafts else None,
        "tokens_per_target_forward": total.tokens_per_target_forward if strategy.uses_target else None,
        "lossless": strategy.lossless,
        "must_be_the_targets": strategy.repeats_target(settings),
        "compared_texts": len(texts),
        "same_texts": sum(texts.values()),
        "other_texts_at_prompts": [place for place, same in texts.items() if not same],
    }
    return Finding(_cells(figures, ups), figures)


def _cells(row: dict[str, Any], ups: Sequence[float]) -> tuple[str, ...]:
    def told(name: str, form: str) -> str:
        return "-" if row[name] is None else form.format(row[name])

    drafts = f"{row['accepted']}/{row['drafted']}{told('acceptance_rate', ' = {:.3f}')}" if row["drafted"] else "-"
    return (
        row["task"],
        row["strategy"],
        str(row["prompts"]),
        told("tokens_per_second", "{:.1f}"),
        told("speedup", "{:.2f}x"),
        f"{min(ups):.2f} - {max(ups):.2f}" if ups else "-",
        drafts,
        told("tokens_per_target_forward", "{:.2f}"),
        f"same {row['same_texts']} of {row['compared_texts']}" if row["compared_texts"] else "-",
    )


def _conclusion(bench: Bench, settings: Settings, asked: int, findings: Sequence[Finding]) -> list[str]:
    rows = [finding.figures for finding in findings]
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    whole = list(tasks.values())[-1]
    ran = max(row["prompts"] for row in whole)
    lines = [f"{ran} of {asked} prompts were run."] if ran < asked else []
    lines += [_best(task, part) for task, part in tasks.items()]
    lines += _texts(
        [row for row in whole if row["lossless"] and row["strategy"] != bench.baseline.name], bench, settings
    )
    return [*lines, "Speed-ups are geometric means over the prompts, one run each: /race repeats one prompt."]


def _best(task: str, rows: Sequence[dict[str, Any]]) -> str:
    """Which of the strategies that keep the target's law is the fastest."""
    kept = [row for row in rows if row["lossless"]]
    if not kept:
        return f"{task}: no strategy was on that keeps the target's law."
    if all(row["speedup"] is None for row in kept):
        best = max(kept, key=lambda row: row["tokens_per_second"] or 0.0)
        return f"{task}: {best['strategy']} is the fastest, {best['tokens_per_second'] or 0:.1f} tokens/s; /target on gives speed-ups."
    best = max(kept, key=lambda row: row["speedup"] or 0.0)
    if best["speedup"] <= 1:
        return f"{task}: nothing is faster than the target alone."
    ups = [up for up in best["speedups"] if up is not None]
    often = f"faster on {sum(up > 1 for up in ups)} of {len(ups)}"
    return f"{task}: {best['strategy']} is the fastest, {best['speedup']:.2f}x target-only, {often}."


def _texts(rows: Sequence[dict[str, Any]], bench: Bench, settings: Settings) -> list[str]:
    """What is to be said about whether texts are the target's."""
    held, free = (
        [row for row in rows if row["must_be_the_targets"] is must and row["compared_texts"]] for must in (True, False)
    )
    same, compared = (sum(row[name] for row in held) for name in ("same_texts", "compared_texts"))
    lines = []
    if compared:
        lines.append(f"Texts that had to be the target's, and are: {same} of {compared}.")
    if same < compared:
        others = "; ".join(
            f"{row['strategy']} at prompt {_listed(row)}" for row in held if row["other_texts_at_prompts"]
        )
        state = bench.pair.engine.state
        why = (
            "which should not happen"
            if state.verified
            else "a rounding tie perhaps, since this engine does not promise equal bits"
        )
        lines.append(f"Other texts: {others}: {why}. Send such a prompt: /divergence says more.")
    if free:
        names = " and ".join(row["strategy"] for row in free)
        lines.append(
            f"{names}: under /verify {settings.verify} with sampling a text may differ; /verify coupled makes it the target's."
        )
    return lines


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(map(str, row["other_texts_at_prompts"]))


SUITE = Command(
    "suite",
    "FILE",
    "every prompt of a file by every strategy that is on: speed-up, acceptance and texts by task",
    _suite,
)
