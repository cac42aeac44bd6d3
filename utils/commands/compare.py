"""/compare: two --json files, prompt by prompt: two machines, two drafters, two versions or two settings.

Nothing is run. Speeds of the same prompt are compared, so differences in difficulty of the prompts do not count. The
verdict is a confidence interval over prompts (`utils.metrics.intervals`).
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.charts import BASELINE, DotChart, DotRow
from utils.comparison.matching import Match, differences, match
from utils.comparison.measurements import read_measurements
from utils.comparison.reports import Finding, Report, ReportEvent, shortened
from utils.errors import UserError
from utils.metrics.intervals import UNCLEAR, speedup_interval
from utils.metrics.results import first_difference

EXAMPLE = "/compare a.jsonl b.jsonl"
HEADINGS = ("prompt", "strategy", "runs", "tokens/s A -> B", "B / A", "acceptance A -> B", "text")
OPTIONAL = ("runs", "acceptance A -> B")
SHOWN_PROMPT, SHOWN_LINES, MAX_ROWS = 24, 20, 60
MIN_PROMPTS = 3  # fewer prompts show no interval in the chart
AT_OTHER_TIMES = "The files were recorded at different times: other load on the machines is part of the difference."
SAME = "Versions, models, engine, machine and settings are the same in both files."
NOT_COMPARED = "Not compared:"
DIFFERENT = "What differs between the files:"
Row = dict[str, Any]  # the figures of a finding


def _compare(argument: str, context: CommandContext) -> Outcome:
    first, second = (read_measurements(path_in(name, EXAMPLE)) for name in _names(argument))
    matches, problems = match(first.measurements, second.measurements)
    if not matches:
        raise UserError(f"the files have no prompt and strategy in common. {' '.join(problems[:1])}")
    conclude = partial(
        _conclusion, matches, [*first.left_out, *second.left_out, *problems], first.others + second.others
    )
    title = f"/compare: A is {first.path}, B is {second.path}"
    report = Report(
        "compare",
        f"{first.path} {second.path}",
        context.settings,
        HEADINGS,
        _findings(matches),
        conclude,
        charts=_charts,
        optional=OPTIONAL,
        title=title,
    )
    return [RunReport(report)]


def _names(argument: str) -> list[str]:
    try:
        names = shlex.split(argument)
    except ValueError as error:
        raise UserError(f"a quotation mark is missing; an example: {EXAMPLE}.") from error
    if len(names) != 2:
        raise UserError(f"give two files, for example: {EXAMPLE}.")
    return names


def _findings(matches: Sequence[Match]) -> Iterator[ReportEvent]:
    for number, found in enumerate(matches):
        row = _figures(found)
        # A finding without cells is only recorded.
        yield Finding(_cells(row) if number < MAX_ROWS else (), row)


def _figures(found: Match) -> Row:
    """The figures of a match. Lists of two are [A, B]."""
    sides = (found.first, found.second)
    known = [next((one for one in side if one.tokens is not None or one.text is not None), None) for side in sides]
    ours, theirs = known
    row: Row = {
        "prompt": found.prompt,
        "strategy": found.strategy,
        "baseline": found.first[0].baseline,
        "lines": [[one.line for one in side] for side in sides],
        "tokens_per_second": [[speed for one in side for speed in one.speeds] for side in sides],
        "ratios": found.ratios,
        "speedup_ratios": found.speedup_ratios,
        "speedups": [[value for one in side for value in one.speedups] for side in sides],
        "accepted": [next((one.accepted for one in side if one.accepted is not None), None) for side in sides],
        "drafted": [next((one.drafted for one in side if one.drafted is not None), None) for side in sides],
        "same_text": None,
        "first_difference": None,
    }
    if ours is not None and theirs is not None:
        # The ids of two tokenizers differ for the same text.
        by_tokens = ours.model == theirs.model and ours.tokens is not None and theirs.tokens is not None
        row["same_text"] = ours.tokens == theirs.tokens if by_tokens else ours.text == theirs.text
        if by_tokens:
            row["first_difference"] = first_difference(ours.tokens or (), theirs.tokens or ())
    return row


def _cells(row: Row) -> tuple[str, ...]:
    speeds = row["tokens_per_second"]
    return (
        shortened(row["prompt"], SHOWN_PROMPT),
        row["strategy"],
        " -> ".join(str(len(part)) for part in speeds),
        " -> ".join(f"{geometric_mean(part):.1f}" for part in speeds),
        f"{geometric_mean(row['ratios']):.2f}x",
        _acceptance(row["accepted"], row["drafted"]),
        _text(row),
    )


def _acceptance(accepted: Sequence[int | None], drafted: Sequence[int | None]) -> str:
    if None in accepted or None in drafted:
        return "-"
    return " -> ".join(f"{part}/{whole}" for part, whole in zip(accepted, drafted, strict=True))


def _text(row: Row) -> str:
    if row["same_text"] is None:
        return "-"
    if row["same_text"]:
        return "same"
    place = row["first_difference"]
    return "differs" if place is None else f"differs at token {place + 1}"


def _by_strategy(findings: Sequence[Finding]) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for finding in findings:
        rows.setdefault(finding.figures["strategy"], []).append(finding.figures)
    return rows


def _conclusion(
    matches: Sequence[Match], problems: Sequence[str], others: Counter[str], findings: Sequence[Finding]
) -> list[str]:
    lines = [line for name, rows in _by_strategy(findings).items() for line in _verdict(name, rows)]
    if len(findings) > MAX_ROWS:
        lines.append(
            f"{len(findings) - MAX_ROWS} more rows are not shown, but they count, and /export FILE.json has them."
        )
    if problems:
        lines += [NOT_COMPARED, *problems[:SHOWN_LINES]]
        lines += [f"and {len(problems) - SHOWN_LINES} more."] if len(problems) > SHOWN_LINES else []
    if others:
        lines.append(f"Records of other reports are not compared: {', '.join(f'{n} {c}' for n, c in others.items())}.")
    found = differences(matches)
    return [*lines, AT_OTHER_TIMES, *([DIFFERENT, *found] if found else [SAME])]


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


def _charts(findings: Sequence[Finding]) -> list[DotChart]:
    """A dot for each prompt and the interval over prompts."""
    rows = []
    for name, of_name in _by_strategy(findings).items():
        ratios = _by_prompt(of_name, "ratios")
        interval = speedup_interval(ratios)
        means = [geometric_mean(of_prompt) for of_prompt in ratios]
        shown = (interval.low, interval.high) if len(ratios) >= MIN_PROMPTS else None
        rows.append(DotRow(name, means, shown, figure=f"{interval.estimate:.2f}x"))
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
