"""/replay: runs every generation of a --json file again, and compares text, acceptance and speed with the record.

The settings are those of each record. Models, engine and versions are the present ones, and differences are reported.
Each run has an n-gram storage of its own, as with /ngram keep off.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

from utils.commands.experiments.repeated_runs import one_by_one
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.harness import Harness
from utils.comparison.recorded_runs import RecordedRun, read_recorded_runs
from utils.comparison.records import circumstances
from utils.comparison.reports import Finding, Report, ReportEvent
from utils.comparison.speed_claims import FASTER, NOT_DISTINGUISHABLE, SLOWER, SpeedClaim
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import shortened
from utils.config.setting_table import from_json
from utils.config.settings import Settings
from utils.decode.model_info import vocabulary_size
from utils.errors import UserError, check_choice
from utils.metrics.results import Generation, difference_text, first_difference
from utils.text import count_of, decode

HEADINGS = ("line", "strategy", "text", "accepted", "tokens/s", "ratio")
OPTIONAL = ("accepted",)
NOISE = 1.15  # a ratio of speeds that two equal runs can differ by
OTHER_TEXT = "a recorded text is not the text of its token ids: the tokenizer differs, or the file was edited"
OTHER_PROMPT = "the prompt has a different number of tokens: the chat template or the tokenizer differs"
KEPT_STORAGE = "recorded with /ngram keep on: drafts may come from earlier prompts, so the acceptance may differ"
CHANGED = "What has changed:"
UNCHANGED = "Versions, models, engine and settings have not changed."
UNEXPLAINED = "Nothing that is recorded explains this: /audit checks what is deterministic here."
INTERRUPTED = "{} compared up to the interruption, without the speed."
SHOWN_LINES = 5  # lines of the file shown for each reason why records were skipped
Row = Mapping[str, Any]  # the figures of a finding


def _replay(argument: str, context: CommandContext) -> Outcome:
    path = path_in(argument, "/replay runs.jsonl")
    recorded, others = read_recorded_runs(path)
    conclude = partial(_conclusion, len(recorded), others)
    events, title = _events(recorded, context), f"/replay {path} (recorded -> now)"
    report = Report("replay", str(path), context.settings, HEADINGS, events, conclude, optional=OPTIONAL, title=title)
    return [RunReport(report)]


def _events(recorded: Sequence[RecordedRun], context: CommandContext) -> Iterator[ReportEvent]:
    warm: set[tuple[str, ...]] = set()

    def run(index: int, past: RecordedRun) -> Generator[ReportEvent, None, float | None]:
        row = _rerun(past, context, warm)
        yield Finding(_cells(row), row)
        return None if row["left_out"] is not None else row["seconds"]

    return one_by_one(recorded, lambda past: past.strategy, run)


def _rerun(past: RecordedRun, context: CommandContext, warm: set[tuple[str, ...]]) -> dict[str, Any]:
    """Run a record again. Returns its figures, with the reason if it could not be run."""
    harness = context.harness
    # An unsupported value becomes a difference and keeps its default, so the record can still run.
    settings, differences = from_json(past.settings, context.limits)
    differences += past.differences(circumstances(harness.pair, settings))
    try:
        strategy = _strategy(past, settings, harness)
        prompt = harness.prompt_ids(past.prompt, settings, past.history)
        if (key := (strategy.name, *settings.drafter_kind)) not in warm:
            harness.run_alone(prompt, strategy, shortened(settings), history=past.history)
            warm.add(key)
        run = harness.run_alone(prompt, strategy, settings, history=past.history)
    except UserError as error:
        return _figures(past, differences) | {"left_out": str(error)}
    differences += _input_differences(past, settings, strategy, harness, prompt_tokens=len(prompt))
    return _figures(past, differences) | _run_figures(past, run) | {"prompt_tokens": [past.prompt_tokens, len(prompt)]}


def _strategy(past: RecordedRun, settings: Settings, harness: Harness) -> Strategy:
    """The strategy of the record. Raises UserError if the record cannot be run again."""
    if past.interrupted and not past.tokens:
        raise UserError("It was interrupted before its first token.")
    if (highest := max(past.tokens, default=0)) >= vocabulary_size(harness.pair.target):
        raise UserError(f"Its token id {highest} is outside the vocabulary of the target.")
    strategies = {strategy.name: strategy for strategy in harness.variants(settings)}
    strategy = strategies[check_choice(past.strategy, tuple(strategies), "strategy")]
    if strategy.needs_drafter and harness.pair.drafter is None:
        raise UserError("No drafter is loaded: start with --drafter, or /load one.")
    return strategy


def _input_differences(
    past: RecordedRun, settings: Settings, strategy: Strategy, harness: Harness, *, prompt_tokens: int
) -> Iterator[str]:
    """A sentence for each difference in the inputs of the run."""
    label = strategy.drafter_label(harness.pair)
    if past.drafter_kind != label:
        yield f"{strategy.name}, drafter kind: {past.drafter_kind} then, {label} now"
    if past.text is not None and past.text != decode(harness.pair.tokenizer, past.tokens):
        yield OTHER_TEXT
    if prompt_tokens != past.prompt_tokens:
        yield OTHER_PROMPT
    if strategy.keeps_texts and not settings.reset_in_between:
        yield KEPT_STORAGE


def _figures(past: RecordedRun, differences: list[str]) -> dict[str, Any]:
    return {
        "line": past.line,
        "strategy": past.strategy,
        "left_out": None,
        "seconds": None,
        "differences": differences,
    }


def _run_figures(past: RecordedRun, run: Generation) -> dict[str, Any]:
    """The figures of both runs; pairs are [then, now]. An interrupted run is compared up to its end, without speed."""
    # The present run is complete, and only its beginning can be compared.
    tokens = run.tokens[: len(past.tokens)] if past.interrupted else run.tokens
    rounds = replace(run, steps=run.steps[: past.rounds]) if past.interrupted and past.rounds is not None else run
    drafts = past.drafted is not None
    accepted, drafted = (rounds.accepted, rounds.drafted) if drafts else (None, None)
    same_rounds = past.rounds is None or past.rounds == len(rounds.steps)
    speed, before = run.tokens_per_second, past.tokens_per_second
    return {
        "seconds": run.seconds,
        "interrupted": past.interrupted,
        "first_difference": first_difference(tokens, past.tokens),
        "same_acceptance": same_rounds and (past.accepted, past.drafted) == (accepted, drafted) if drafts else None,
        "accepted": [past.accepted, accepted],
        "drafted": [past.drafted, drafted],
        "tokens_per_target_forward": [past.tokens_per_target_forward, rounds.tokens_per_target_forward],
        "tokens_per_second": [before, speed],
        # A file can be edited: a speed near 0 would give a meaningless ratio.
        "ratio": speed / before if speed and before and before > 1e-6 and not past.interrupted else None,
    }


def _cells(row: Row) -> tuple[str, ...]:
    if row["left_out"] is not None:
        return (str(row["line"]), row["strategy"], "left out", "-", "-", "-")
    counts = zip(row["accepted"], row["drafted"], strict=True)
    return (
        str(row["line"]),
        row["strategy"],
        difference_text(row["first_difference"]),
        "-" if row["same_acceptance"] is None else " -> ".join(f"{accepted}/{drafted}" for accepted, drafted in counts),
        " -> ".join("-" if speed is None else f"{speed:.1f}" for speed in row["tokens_per_second"]),
        "-" if row["ratio"] is None else f"{row['ratio']:.2f}x",
    )


def _conclusion(recorded: int, others: Counter[str], findings: Sequence[Finding]) -> list[str]:
    rows = [finding.figures for finding in findings]
    lines = _agreement([row for row in rows if row["left_out"] is None])
    if interrupted := sum(row["left_out"] is None and row["interrupted"] for row in rows):
        lines.append(INTERRUPTED.format(count_of(interrupted, "interrupted record")))
    lines += _left_out([row for row in rows if row["left_out"] is not None])
    if len(rows) < recorded:
        lines.append(f"{recorded - len(rows)} of {recorded} records were not reached.")
    if others:
        kinds = ", ".join(f"{name} {count}" for name, count in others.items())
        lines.append(f"Records of reports are not replayed: {kinds}.")
    return [*lines, *_differences(rows)]


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Each reason why records were skipped, with the first of their lines."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        lines.setdefault(row["left_out"], []).append(str(row["line"]))
    return [
        f"{count_of(len(at), 'record')} left out (line {_first_lines(at)}): {reason}" for reason, at in lines.items()
    ]


def _first_lines(numbers: Sequence[str]) -> str:
    return ", ".join([*numbers[:SHOWN_LINES], *(["..."] if len(numbers) > SHOWN_LINES else [])])


def _agreement(rows: Sequence[Row]) -> list[str]:
    """How many texts and acceptances are equal, and whether the speed is."""
    if not rows:
        return []
    same = sum(row["first_difference"] is None for row in rows)
    accepted = [row["same_acceptance"] for row in rows if row["same_acceptance"] is not None]
    return [
        f"{same} of {count_of(len(rows), 'text')} {'is' if same == 1 else 'are'} the same.",
        *([f"Acceptance is the same in {sum(accepted)} of {len(accepted)}."] if accepted else []),
        *_speed([row["ratio"] for row in rows if row["ratio"] is not None]),
    ]


def _speed(ratios: Sequence[float]) -> list[str]:
    """One sentence on the ratios of speeds now to then, if there are any."""
    if not ratios:
        return []
    summary = f"median {median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f}), {speed_verdict(ratios)}"
    return [f"Speed now / recorded: {summary}."]


def speed_verdict(ratios: Sequence[float]) -> str:
    """Whether runs have become faster or slower. The 95 % interval and the middle half must agree, and the median must
    exceed NOISE.
    """
    verdict = SpeedClaim.of([[ratio] for ratio in ratios]).verdict
    if verdict not in (FASTER, SLOWER):
        return verdict
    # Doubling keeps the quartiles close to measured ratios where there are few.
    low, _, high = quantiles([*ratios, *ratios], n=4, method="inclusive")
    if low <= 1 <= high or 1 / NOISE < median(ratios) < NOISE:
        return NOT_DISTINGUISHABLE
    return verdict


def _differences(rows: Sequence[Row]) -> list[str]:
    """Each difference once, with its number of records unless that is all of them."""
    counts = Counter(sentence for row in rows for sentence in row["differences"])
    lines = [
        sentence + ("" if count == len(rows) else f" ({count} of {len(rows)} records)")
        for sentence, count in counts.items()
    ]
    if lines:
        return [CHANGED, *lines]
    if any(row["left_out"] is None and _has_changed(row) for row in rows):
        return [UNEXPLAINED]
    return [UNCHANGED]


def _has_changed(row: Row) -> bool:
    return row["first_difference"] is not None or row["same_acceptance"] is False


REPLAY = Command(
    "replay",
    "FILE",
    "run the records of a file again",
    _replay,
    group="checks",
    page=Page(
        "Run every generation of a --json file again with its own settings, compare text, acceptance and speed, and "
        "name every difference in versions, models, engine and settings.",
        ("> /replay runs.jsonl", "3 of 3 texts are the same"),
        see_also=("compare", "export", "audit"),
    ),
    files=("",),
)
