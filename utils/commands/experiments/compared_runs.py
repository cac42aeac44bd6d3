"""What is shown of matched runs: a row for each, sentences by strategy, and a chart. /compare matches two files, and
/replay a file with its runs of now.

Speeds of the same prompt are compared, so differences in difficulty of the prompts do not count. The verdict is a
confidence interval over prompts (`utils.metrics.intervals`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, by_strategy, figure
from utils.comparison.charts import BASELINE, DotChart, DotRow
from utils.comparison.recorded_runs import RunMatch, differences
from utils.comparison.reports import Finding, shortened
from utils.metrics.intervals import UNCLEAR, speedup_interval
from utils.metrics.results import difference_text, first_difference

SHOWN_PROMPT, SHOWN_LINES, MAX_ROWS = 24, 20, 60
MIN_PROMPTS = 3  # fewer prompts show no interval in the chart
AT_OTHER_TIMES = "A and B were recorded at different times: other load on the machines is part of the difference."
SAME = "Versions, models, engine, machine and settings are the same in A and B."
NOT_COMPARED = "Not compared:"
DIFFERENT = "What differs between A and B:"
Row = dict[str, Any]  # the figures of a finding


def _acceptance(row: Mapping[str, Any]) -> str:
    counts = zip(row["accepted"], row["drafted"], strict=True)
    known = None not in (*row["accepted"], *row["drafted"])
    return " -> ".join(f"{part}/{whole}" for part, whole in counts) if known else NOTHING


def _text(row: Mapping[str, Any]) -> str:
    if row["same_text"] is None:
        return NOTHING
    place = row["first_difference"]
    return "differs" if not row["same_text"] and place is None else difference_text(place)


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


def match_figures(found: RunMatch) -> Row:
    """The figures of a match. Lists of two are [A, B]."""
    sides = (found.first, found.second)
    texts = [next((one for one in side if one.tokens is not None or one.text is not None), None) for side in sides]
    same, place = None, None
    if texts[0] is not None and texts[1] is not None:
        ours, theirs = texts[0], texts[1]
        # The ids of two tokenizers differ for the same text.
        by_tokens = ours.model == theirs.model and ours.tokens is not None and theirs.tokens is not None
        same = ours.tokens == theirs.tokens if by_tokens else ours.text == theirs.text
        place = first_difference(ours.tokens or (), theirs.tokens or ()) if by_tokens else None
    return {
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
        "same_text": same,
        "first_difference": place,
    }


def match_finding(found: RunMatch, number: int) -> Finding:
    """The row of a match, the `number` of which counts from 0. Rows beyond the first MAX_ROWS are only recorded."""
    row = match_figures(found)
    return TABLE.finding(row) if number < MAX_ROWS else Finding((), row)


def comparison_lines(
    matches: Sequence[RunMatch], problems: Sequence[str], others: Counter[str], findings: Sequence[Finding]
) -> list[str]:
    """The sentences below the table. `problems` are runs without a counterpart, `others` other records by kind."""
    lines = [line for name, rows in by_strategy(findings).items() for line in _verdict(name, rows)]
    if (more := len(findings) - MAX_ROWS) > 0:
        lines.append(f"{more} more rows are not shown, but they count, and /export FILE.json has them.")
    if problems:
        lines += [NOT_COMPARED, *problems[:SHOWN_LINES]]
        lines += [f"and {len(problems) - SHOWN_LINES} more."] if len(problems) > SHOWN_LINES else []
    if others:
        lines.append(f"Records of other reports are not compared: {', '.join(f'{n} {c}' for n, c in others.items())}.")
    found = differences(matches) if matches else []
    return [*lines, *([AT_OTHER_TIMES, *([DIFFERENT, *found] if found else [SAME])] if matches else [])]


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
