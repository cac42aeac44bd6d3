"""The sentences and the plots below the table of /server load: up to which load the server is ahead of its baseline."""

from collections.abc import Sequence
from typing import Any

from utils.comparison.charts import Chart, LineChart
from utils.comparison.reports import Finding

Row = dict[str, Any]
AHEAD, BEHIND, MIXED = "ahead", "behind", "mixed"
NO_BASELINE = "Nothing to compare with: a server that was added with baseline=NAME is measured beside that one."
SAMPLE = "Turns on one machine are few and not independent: these are measurements, not intervals."
COUNTED = "The server counts no tokens, so it has no throughput."


def conclusion(findings: Sequence[Finding]) -> list[str]:
    """Where the server is ahead of its baseline, and where it is not any more."""
    rows = [finding.figures for finding in findings]
    lines = [COUNTED] if any(row["tokens_per_second"] is None for row in rows) else []
    compared = [row for row in rows if row["speedups"]]
    if not compared:
        return [*lines, NO_BASELINE] if all(row["baseline"] is None for row in rows) else lines
    sides = {_side(row) for row in compared}
    lines += [_side_sentence(side, compared) for side in (AHEAD, BEHIND, MIXED) if side in sides]
    lines += _crossing(compared)
    if all(row["drafted"] and not row["accepted"] for row in compared):
        lines.append("No draft was accepted, so drafts cannot have made it faster.")
    notes = dict.fromkeys(note for row in compared for note in row["acceptance_notes"])
    return [*lines, *(f"Acceptance: {note}." for note in notes), SAMPLE]


def _side(row: Row) -> str:
    """Whether all turns agree on which server has the higher throughput."""
    if all(ratio > 1 for ratio in row["speedups"]):
        return AHEAD
    return BEHIND if all(ratio < 1 for ratio in row["speedups"]) else MIXED


def _side_sentence(side: str, rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if _side(row) == side]
    name, baseline = chosen[0]["server"], chosen[0]["baseline"]
    loads = ", ".join(f"{row['concurrency']} ({row['speedup']:.2f}x)" for row in chosen)
    turns = "every turn" if len(chosen[0]["speedups"]) > 1 else "the only turn"
    words = {
        AHEAD: f"{name} has a higher throughput than {baseline} in {turns}",
        BEHIND: f"{name} has a lower throughput than {baseline} in {turns}",
        MIXED: f"{name} and {baseline} are not distinguishable",
    }[side]
    return f"{words} with this many requests at once: {loads}."


def _crossing(rows: Sequence[Row]) -> list[str]:
    """The load from which on speculation does not pay any more, if it pays below."""
    sides = [_side(row) for row in rows]
    last = max((index for index, side in enumerate(sides) if side == AHEAD), default=None)
    if last is None or last == len(rows) - 1:
        return []
    before, after = rows[last]["concurrency"], rows[last + 1]["concurrency"]
    return [f"Speculation stops paying between {before} and {after} requests at once."]


def load_charts(findings: Sequence[Finding]) -> list[Chart]:
    """Throughput, and the median time per token, over the number of requests at the same time."""
    rows = [finding.figures for finding in findings]
    counts = sorted({row["concurrency"] for row in rows})
    names = list(dict.fromkeys(row["server"] for row in rows))
    if len(counts) < 2:
        return []
    speeds = {name: [_value(rows, name, count, "tokens_per_second") for count in counts] for name in names}
    times = {
        name: [None if pair is None else 1000 * pair[0] for pair in (_pair(rows, name, count) for count in counts)]
        for name in names
    }
    ticks = [str(count) for count in counts]
    return [
        LineChart("throughput, tokens/s of all requests", "requests at once", ticks, speeds),
        LineChart("milliseconds per token after the first, median", "requests at once", ticks, times),
    ]


def _value(rows: Sequence[Row], name: str, count: int, figure: str) -> float | None:
    found = next((row[figure] for row in rows if (row["server"], row["concurrency"]) == (name, count)), None)
    return None if found is None else float(found)


def _pair(rows: Sequence[Row], name: str, count: int) -> tuple[float, float] | None:
    return next((row["token_seconds"] for row in rows if (row["server"], row["concurrency"]) == (name, count)), None)
