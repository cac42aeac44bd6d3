"""/replay: every generation of a --json file once more, and what came out otherwise: text, acceptance, speed.

Settings are those of each record; models, engine and versions are those of now, and where they are others that is said by name. Each run
is alone on a storage of its own, as after /reset_in_between on.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

from utils.commands.paths import path_in
from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Bench, run_alone
from utils.comparison.recorded_runs import PastRun, read_past_runs
from utils.comparison.records import circumstances
from utils.comparison.reports import Finding, Progress, Report, time_left
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import briefly
from utils.config.settings import Settings, restored
from utils.errors import UserError, one_of
from utils.metrics.results import Generation, first_difference
from utils.text import decode

HEADINGS = ("line", "strategy", "text", "accepted then -> now", "tokens/s then -> now", "ratio")
NOISE = 1.15  # machines are no steadier than that
FEW = 5  # ratios, fewer than which say nothing of speed
OTHER_TEXT = "a recorded text is not that of its token ids here: another tokenizer, or the file was edited"
OTHER_PROMPT = "the prompt gives another number of tokens: another chat template or tokenizer"
KEPT_STORAGE = (
    "recorded with /reset_in_between off: its drafts may come from prompts before it, so acceptance may differ"
)


def _replay(argument: str, situation: Situation) -> Outcome:
    path = path_in(argument, "/replay runs.jsonl")
    past, others = read_past_runs(path)
    report = Report(
        "replay",
        str(path),
        situation.settings,
        HEADINGS,
        _rows(past, situation),
        partial(_conclusion, len(past), others),
    )
    return Outcome(report=report)


def _rows(past: Sequence[PastRun], situation: Situation) -> Iterator[Progress | Finding]:
    warm: set[tuple[str, ...]] = set()
    spent, ran = 0.0, 0
    for place, one in enumerate(past):
        yield Progress(
            f"{place + 1} of {len(past)} ({one.strategy}){time_left(spent, ran, ran + len(past) - place)} ..."
        )
        row = _again(one, situation, warm)
        yield Finding(_cells(row), row)
        spent, ran = spent + (row["seconds"] or 0.0), ran + (row["left_out"] is None)


def _again(past: PastRun, situation: Situation, warm: set[tuple[str, ...]]) -> dict[str, Any]:
    """The figures of a record and of its rerun; why there is none where it cannot be had."""
    bench = situation.bench
    settings, differences = restored(past.settings, situation.limits)
    differences += past.differences(circumstances(bench.pair, settings))
    try:
        strategy = _strategy(past, settings, bench)
        prompt = bench.ids(past.prompt, settings, past.history)
        if (key := (strategy.name, *settings.drafter_kind)) not in warm:
            run_alone(bench, prompt, strategy, briefly(settings), history=past.history)
            warm.add(key)
        run = run_alone(bench, prompt, strategy, settings, history=past.history)
    except UserError as error:
        return _figures(past, differences, None) | {"left_out": str(error)}
    label = strategy.drafter_kind(bench.pair)
    if past.drafter_kind != label:
        differences.append(f"{strategy.name} drafts by: {past.drafter_kind} then, {label} now")
    if past.text is not None and past.text != decode(bench.pair.tokenizer, past.tokens):
        differences.append(OTHER_TEXT)
    if len(prompt) != past.prompt_tokens:
        differences.append(OTHER_PROMPT)
    if strategy.keeps_texts and not settings.reset_in_between:
        differences.append(KEPT_STORAGE)
    return _figures(past, differences, run) | {"prompt_tokens": [past.prompt_tokens, len(prompt)]}


def _strategy(past: PastRun, settings: Settings, bench: Bench) -> Strategy:
    """The one that was run. Raises UserError where it is not there, or the record is not of a run that can be had again."""
    if past.interrupted and not past.tokens:
        raise UserError("It was interrupted before its first token.")
    strategies = {strategy.name: strategy for strategy in bench.variants(settings)}
    strategy = strategies[one_of(past.strategy, tuple(strategies), "strategy")]
    if strategy.needs_drafter and bench.pair.drafter is None:
        raise UserError("No drafter is loaded: start with --drafter, or /load one.")
    return strategy


def _figures(past: PastRun, differences: list[str], run: Generation | None) -> dict[str, Any]:
    """Pairs are then and now. An interrupted run is compared as far as it went, and its speed not at all."""
    figures: dict[str, Any] = {
        "line": past.line,
        "strategy": past.strategy,
        "left_out": None,
        "seconds": None,
        "differences": differences,
    }
    if run is None:
        return figures
    told = run.tokens[: len(past.tokens)] if past.interrupted else run.tokens
    rounds = replace(run, steps=run.steps[: past.rounds]) if past.interrupted and past.rounds is not None else run
    now = None if past.drafted is None else (rounds.accepted, rounds.drafted, len(rounds.steps))
    then = (past.accepted, past.drafted, past.rounds if past.rounds is not None else len(rounds.steps))
    speed, before = run.tokens_per_second, past.tokens_per_second
    return figures | {
        "seconds": run.seconds,
        "interrupted": past.interrupted,
        "first_difference": first_difference(told, past.tokens),
        "same_acceptance": None if now is None else then == now,
        "accepted": [past.accepted, now and now[0]],
        "drafted": [past.drafted, now and now[1]],
        "tokens_per_target_forward": [past.tokens_per_target_forward, rounds.tokens_per_target_forward],
        "tokens_per_second": [before, speed],
        "ratio": speed / before if speed and before and before > 1e-6 and not past.interrupted else None,
    }


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["left_out"] is not None:
        return (str(row["line"]), row["strategy"], f"left out. {row['left_out']}", "-", "-", "-")
    place, (was, accepted), (of, drafted) = row["first_difference"], row["accepted"], row["drafted"]
    text = "same" if place is None else f"differs at token {place + 1}"
    speeds = " -> ".join("-" if speed is None else f"{speed:.1f}" for speed in row["tokens_per_second"])
    return (
        str(row["line"]),
        row["strategy"],
        text + (", as far as it went" if row["interrupted"] else ""),
        "-" if row["same_acceptance"] is None else f"{was}/{of} -> {accepted}/{drafted}",
        speeds,
        "-" if row["ratio"] is None else f"{row['ratio']:.2f}x",
    )


def _conclusion(asked: int, others: Counter[str], findings: Sequence[Finding]) -> list[str]:
    rows = [finding.figures for finding in findings]
    ran = [row for row in rows if row["left_out"] is None]
    lines = []
    if ran:
        same = sum(row["first_difference"] is None for row in ran)
        accepted = [row["same_acceptance"] for row in ran if row["same_acceptance"] is not None]
        lines.append(f"{same} of {len(ran)} texts are the same.")
        lines += [f"Acceptance is the same in {sum(accepted)} of {len(accepted)}."] if accepted else []
        lines += _speed([row["ratio"] for row in ran if row["ratio"] is not None])
    if len(ran) < len(rows):
        lines.append(f"{len(rows) - len(ran)} of {len(rows)} records were left out; their rows say why.")
    if len(rows) < asked:
        lines.append(f"{asked - len(rows)} of {asked} records were not reached.")
    if others:
        kinds = ", ".join(f"{name} {count}" for name, count in others.items())
        lines.append(f"Records of reports, which are not replayed: {kinds}.")
    return [*lines, *_differences(rows)]


def _speed(ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return []
    middle, (low, _, high) = median(ratios), quantiles([*ratios, *ratios], n=4, method="inclusive")
    noise = low <= 1 <= high or 1 / NOISE < middle < NOISE
    told = "within noise" if noise else "faster" if middle > 1 else "slower"
    told = told if len(ratios) >= FEW else "too few to tell"
    return [
        f"Speed now / then: median {middle:.2f} ({min(ratios):.2f} - {max(ratios):.2f}), {told}; one run each, then and now."
    ]


def _differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each once; with the number of records where it is not all of them."""
    counts = Counter(sentence for row in rows for sentence in row["differences"])
    lines = [
        sentence + ("" if count == len(rows) else f" ({count} of {len(rows)} records)")
        for sentence, count in counts.items()
    ]
    if lines:
        return ["What is not as it was:", *lines]
    if any(
        row["left_out"] is None and (row["first_difference"] is not None or row["same_acceptance"] is False)
        for row in rows
    ):
        return ["Nothing that is recorded explains it: /audit tells what is deterministic here."]
    return ["Versions, models, engine and settings are as they were."]


REPLAY = Command(
    "replay", "FILE", "every generation of a --json file once more: text, acceptance and speed, then and now", _replay
)
