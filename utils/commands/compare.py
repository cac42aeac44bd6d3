"""/compare and /replay: runs of the same prompt and strategy in two --json files A and B, or in A and run again now.

Speeds of the same prompt are compared, so differences in difficulty of the prompts do not count. The verdict is a
confidence interval over prompts (`utils.metrics.intervals`). /replay uses the settings of each record, the present
models, engine and versions, and an n-gram storage for each run, as with /ngram keep off.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any

from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, by_strategy, figure, figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.arms import complete
from utils.comparison.charts import BASELINE, DotChart, DotRow
from utils.comparison.recorded_runs import (
    CIRCUMSTANCES,
    Problem,
    RecordedRun,
    RunMatch,
    differences,
    match,
    problem_sentences,
    read_records,
)
from utils.comparison.records import GENERATION, circumstances
from utils.comparison.reports import Countdown, Finding, Report, ReportEvent, shortened
from utils.comparison.warm_up import shortened as warm_up_settings
from utils.config.setting_table import from_json
from utils.config.settings import Settings
from utils.errors import UserError, check_choice
from utils.metrics.intervals import UNCLEAR, speedup_interval
from utils.metrics.results import difference_text, first_difference

EXAMPLE = "/compare a.jsonl b.jsonl"
SHOWN_PROMPT, SHOWN_LINES, MAX_ROWS = 24, 20, 60
MIN_PROMPTS = 3  # fewer prompts show no interval in the chart
AT_OTHER_TIMES = "A and B were recorded at different times: other load on the machines is part of the difference."
SAME = "Versions, models, engine, machine and settings are the same in A and B."
NOT_COMPARED = "Not compared:"
DIFFERENT = "What differs between A and B:"
KEPT_STORAGE = "recorded with /ngram keep on: drafts may come from earlier prompts, so the acceptance may differ"
UNEXPLAINED = "Nothing that is recorded explains the other texts: /audit checks what is deterministic here."


def _acceptance(row: Row) -> str:
    counts = zip(row["accepted"], row["drafted"], strict=True)
    known = None not in (*row["accepted"], *row["drafted"])
    return " -> ".join(f"{part}/{whole}" for part, whole in counts) if known else NOTHING


def _text(row: Row) -> str:
    if row["same_text"] is None:
        return NOTHING
    place = row["first_difference"]
    return "differs" if place is None and not row["same_text"] else difference_text(place)


TABLE = ResultTable(
    ResultColumn("prompt", lambda row: shortened(row["prompt"], SHOWN_PROMPT)),
    figure("strategy", "strategy"),
    ResultColumn("runs", lambda row: " -> ".join(str(len(part)) for part in row["tokens_per_second"]), drop=1),
    ResultColumn(
        "tokens/s A -> B",
        lambda row: " -> ".join(f"{geometric_mean(part):.1f}" for part in row["tokens_per_second"]),
    ),
    ResultColumn("B / A", lambda row: f"{geometric_mean(row['ratios']):.2f}x"),
    ResultColumn("acceptance A -> B", _acceptance, drop=2),
    ResultColumn("text", _text),
)


def match_figures(found: RunMatch) -> dict[str, Any]:
    """The figures of a match. Lists of two are [A, B]."""
    sides, one = (found.first, found.second), found.first[0]
    speeds = [[speed for run in side for speed in run.speeds] for side in sides]
    speedups = [[value for run in side for value in run.speedups] for side in sides]
    figures = {
        "prompt": one.prompt,
        "strategy": one.strategy,
        "baseline": one.baseline,
        "lines": [[run.line for run in side] for side in sides],
        "tokens_per_second": speeds,
        "ratios": _ratios(*speeds),
        # There are none if a file has no speed-ups, or has a different baseline.
        "speedup_ratios": _ratios(*speedups) if one.baseline == found.second[0].baseline else [],
        "speedups": speedups,
        "accepted": [next((run.accepted for run in side if run.accepted is not None), None) for side in sides],
        "drafted": [next((run.drafted for run in side if run.drafted is not None), None) for side in sides],
    }
    return figures | _text_figures(found)


def _text_figures(found: RunMatch) -> dict[str, Any]:
    """Whether the texts are the same, and where they differ, as far as it is known."""
    ours, theirs = (
        next((run for run in side if run.tokens is not None or run.text is not None), None)
        for side in (found.first, found.second)
    )
    if ours is None or theirs is None:
        return {"same_text": None, "first_difference": None}
    # The ids of two tokenizers differ for the same text.
    if ours.model != theirs.model or ours.tokens is None or theirs.tokens is None:
        return {"same_text": ours.text == theirs.text, "first_difference": None}
    place = first_difference(ours.tokens, theirs.tokens)
    return {"same_text": place is None, "first_difference": place}


def _ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """B over A for each run of the shorter list. Several for one run would repeat its noise and look like agreement."""
    count = min(len(first), len(second))
    ours, theirs = ([geometric_mean(part[index::count]) for index in range(count)] for part in (first, second))
    return [other / one for one, other in zip(ours, theirs, strict=True)]


@dataclass(slots=True)
class _Comparison:
    """The matches of A and B.

    `left_out` are sentences on what has no match, and `others` counts other records by kind.
    """

    left_out: list[str]
    others: Counter[str]
    matches: list[RunMatch] = field(default_factory=list)

    def add(self, found: RunMatch) -> Finding:
        """The row of a further match. Rows beyond the first MAX_ROWS are only recorded."""
        self.matches.append(found)
        row = match_figures(found)
        return TABLE.finding(row) if len(self.matches) <= MAX_ROWS else Finding((), row)

    def conclusion(self, findings: Sequence[Finding]) -> list[str]:
        lines = [line for name, rows in by_strategy(findings).items() for line in _verdict(name, rows)]
        if (hidden := len(findings) - MAX_ROWS) > 0:
            lines.append(f"{hidden} more rows are not shown, but they count, and /export FILE.json has them.")
        if self.left_out:
            lines += [NOT_COMPARED, *self.left_out[:SHOWN_LINES]]
            more = len(self.left_out) - SHOWN_LINES
            lines += [f"and {more} more."] if more > 0 else []
        if self.others:
            others = ", ".join(f"{name} {count}" for name, count in self.others.items())
            lines.append(f"Records of other reports are not compared: {others}.")
        if not self.matches:
            return lines
        found = differences(self.matches)
        return [*lines, AT_OTHER_TIMES, *([DIFFERENT, *found] if found else [SAME])]

    def report(self, name: str, files: str, settings: Settings, events: Iterator[ReportEvent], *, title: str) -> Report:
        """The report of a command on these files."""
        return Report(
            *(name, files, settings, TABLE.headings, events, self.conclusion),
            charts=comparison_charts,
            optional=TABLE.optional,
            title=title,
        )


def _compare(argument: str, context: CommandContext) -> Outcome:
    try:
        names = shlex.split(argument)
    except ValueError as error:
        raise UserError(f"a quotation mark is missing; an example: {EXAMPLE}.") from error
    if len(names) != 2:
        raise UserError(f"give two files, for example: {EXAMPLE}.")
    first, second = (read_records(path_in(name, EXAMPLE)) for name in names)
    matches, problems = match(first.runs, second.runs)
    if not matches:
        raise UserError(f"the files have no prompt and strategy in common. {' '.join(problems[:1])}")
    comparison = _Comparison([*first.left_out, *second.left_out, *problems], first.others + second.others)
    files, title = f"{first.path} {second.path}", f"/compare: A is {first.path}, B is {second.path}"
    events = (comparison.add(found) for found in matches)
    return [RunReport(comparison.report("compare", files, context.settings, events, title=title))]


def _replay(argument: str, context: CommandContext) -> Outcome:
    file = read_records(path_in(argument, "/replay runs.jsonl"))
    recorded = [run for run in file.runs if run.record == GENERATION]
    if not recorded:
        raise UserError(f"{file.path} holds no record of a generation. --json FILE writes one for each.")
    file.others.update({run.line: run.record for run in file.runs if run.record != GENERATION}.values())
    replay = _Replay(file.left_out, file.others, context=context, recorded=recorded)
    title = f"/replay: A is {file.path}, B is the same run now"
    return [RunReport(replay.report("replay", str(file.path), context.settings, replay.events(), title=title))]


@dataclass(slots=True, kw_only=True)
class _Replay(_Comparison):
    """The records of a file and their runs of now. `warm` has what has been warmed up."""

    context: CommandContext
    recorded: Sequence[RecordedRun]
    problems: list[Problem] = field(default_factory=list)
    warm: set[tuple[str, ...]] = field(default_factory=set)

    def events(self) -> Iterator[ReportEvent]:
        countdown, total = Countdown(), len(self.recorded)
        for index, past in enumerate(self.recorded):
            yield countdown.progress(index / total, f"{index + 1} of {total} ({past.strategy})")
            try:
                found = self._rerun(past)
            except UserError as error:
                self.problems.append(Problem("A", past.line, str(error)))
            else:
                yield self.add(found)
        if not self.matches:
            raise UserError(f"none of the records could be run again. {' '.join(problem_sentences(self.problems))}")

    def _rerun(self, past: RecordedRun) -> RunMatch:
        """The record with its run of now. Raises UserError if it cannot run."""
        harness = self.context.harness
        # An unsupported value becomes a note and keeps its default, so the record can still run.
        settings, notes = from_json(past.settings, self.context.limits)
        strategies = {strategy.name: strategy for strategy in harness.variants(settings)}
        strategy = strategies[check_choice(past.strategy, tuple(strategies), "strategy")]
        if strategy.needs_drafter and harness.pair.drafter is None:
            raise UserError("No drafter is loaded: start with --drafter, or /load one.")
        arm = harness.arm(strategy)
        if (key := (strategy.name, *settings.drafter_kind)) not in self.warm:
            complete(arm.run(past.prompt, warm_up_settings(settings), past.history))
            self.warm.add(key)
        run = complete(arm.run(past.prompt, settings, past.history))
        if not run.tokens_per_second:
            raise UserError("the run has no speed.")
        state = circumstances(harness.pair, settings)
        now = replace(
            past,
            circumstances={part: state[part] for part in CIRCUMSTANCES},
            speeds=(run.tokens_per_second,),
            speedups=(),
            text=run.text,
            tokens=run.tokens,
            prompt_tokens=run.prompt_tokens,
            accepted=run.accepted,
            drafted=run.drafted,
            drafter_kind=strategy.drafter_label(harness.pair),
        )
        if strategy.keeps_texts and not settings.reset_in_between:
            notes.append(KEPT_STORAGE)
        return RunMatch([past], [now], notes)

    def conclusion(self, findings: Sequence[Finding]) -> list[str]:
        left_out = [*self.left_out, *problem_sentences(self.problems)]
        if left := len(self.recorded) - len(self.matches) - len(self.problems):
            left_out.append(f"{left} of {len(self.recorded)} records were not reached.")
        lines = _Comparison(left_out, self.others, self.matches).conclusion(findings)
        changed = any(row["same_text"] is False for row in figures_of(findings))
        return [*lines, *([UNEXPLAINED] if changed and not differences(self.matches) else [])]


def _verdict(strategy: str, rows: Sequence[Row]) -> Iterator[str]:
    """Whether a strategy is faster in B, and what else differs."""
    yield f"{strategy}: {_relation(_by_prompt(rows, 'ratios'))}"
    # Without an accepted draft, a speed-up is noise.
    gains = [row for row in rows if row["speedup_ratios"] and strategy != BASELINE and 0 not in row["accepted"]]
    if gains:
        first, second = (geometric_mean([geometric_mean(row["speedups"][side]) for row in gains]) for side in (0, 1))
        relation = _relation(_by_prompt(gains, "speedup_ratios"))
        yield f"{strategy}, speed-up over {gains[0]['baseline']}: {first:.2f}x in A, {second:.2f}x in B; {relation}"
    counted = [row for row in rows if None not in (*row["accepted"], *row["drafted"])]
    totals = [[sum(row[name][side] for row in counted) for name in ("accepted", "drafted")] for side in (0, 1)]
    if all(drafted for _, drafted in totals):
        rates = (f"{accepted}/{drafted} = {accepted / drafted:.3f}" for accepted, drafted in totals)
        yield f"{strategy}, acceptance: {' in A, '.join(rates)} in B."
    if texts := [row["same_text"] for row in rows if row["same_text"] is not None]:
        yield f"{strategy}, texts: {sum(texts)} of {len(texts)} are the same."


def _by_prompt(rows: Sequence[Row], name: str) -> list[list[float]]:
    """The ratios of each prompt. Runs of one prompt with several settings are more alike than runs of other prompts."""
    prompts: dict[str, list[float]] = {}
    for row in rows:
        prompts.setdefault(row["prompt"], []).extend(row[name])
    return list(prompts.values())


def _relation(ratios: Sequence[Sequence[float]]) -> str:
    """How B compares with A, by the ratios of each prompt's runs."""
    interval = speedup_interval(ratios)
    if not interval.is_bounded:
        return f"B / A is about {interval.estimate:.2f} on one prompt, with a single run in a file: too few to tell."
    count, what = (len(ratios), "prompts") if len(ratios) > 1 else (len(ratios[0]), "runs of one prompt")
    words = interval.verdict if interval.verdict == UNCLEAR else f"B is {interval.verdict} than A"
    return (
        f"{words}: B / A is {interval.estimate:.2f} "
        f"(95 % interval {interval.low:.2f} to {interval.high:.2f} over {count} {what})."
    )


def comparison_charts(findings: Sequence[Finding]) -> list[DotChart]:
    """A dot for each prompt and the interval over prompts."""
    rows = []
    for name, of_name in by_strategy(findings).items():
        ratios = _by_prompt(of_name, "ratios")
        interval = speedup_interval(ratios)
        means = [geometric_mean(of_prompt) for of_prompt in ratios]
        shown = (interval.low, interval.high) if len(ratios) >= MIN_PROMPTS else None
        rows.append(DotRow(name, means, shown, figure=f"{interval.estimate:.2f}x"))
    if not rows:
        return []
    return [DotChart("speed of B over speed of A, one dot per prompt", "B / A", rows, 1.0, "no difference")]


COMPARE = Command(
    "compare",
    "A B",
    "two files of --json, prompt by prompt",
    _compare,
    group="results",
    page=Page(
        "Compare the runs in two files of --json: of two machines, drafters, versions or settings. Runs of the same "
        "prompt and strategy are compared; what has no counterpart is named. Nothing is run.",
        (
            "> /compare a.jsonl b.jsonl",
            "speculative: B is faster than A: B / A is 1.23 (95 % interval 1.10 to",
            "1.38 over 12 prompts).",
        ),
        see_also=("replay", "export"),
    ),
    files=("",),
)
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
