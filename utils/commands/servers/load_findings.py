"""The sentences and the plots below the table of /server load: up to which load the server is ahead of its baseline."""

from collections.abc import Sequence
from typing import Any

from utils.commands.servers.race_figures import OTHER_REASON
from utils.comparison.charts import Chart, LineChart
from utils.comparison.reports import Finding
from utils.comparison.speed_claims import (
    FASTER,
    MIN_VALUES,
    NOT_DISTINGUISHABLE,
    SLOWER,
    TOO_FEW,
    speedup_text,
)
from utils.text import count_of

Row = dict[str, Any]
NO_BASELINE = "Nothing to compare with: a server that was added with baseline=NAME is measured beside that one."
SAMPLE = "Turns of one measurement share the state of the machine, so an interval may be too narrow."
COUNTED = "The server counts no tokens, so it has no throughput."
MORE_TURNS = f"Fewer than {MIN_VALUES} turns do not tell a difference from noise: turns={MIN_VALUES} does."
SAVED_NOTHING = "No draft was accepted, so drafts cannot have made it faster."
STOPS = "Speculation stops paying between {} and {} requests at once."
NO_GAIN = "With more than {} at once, neither a gain nor a loss was measured."
SENTENCES = {
    FASTER: "{server} has a higher throughput than {baseline} with this many requests at once: {loads}.",
    SLOWER: "{server} has a lower throughput than {baseline} with this many requests at once: {loads}.",
    NOT_DISTINGUISHABLE: "{server} and {baseline} are not distinguishable with this many requests at once: {loads}.",
    TOO_FEW: "{server} beside {baseline}, by requests at once: {loads}.",
}


def conclusion(findings: Sequence[Finding]) -> list[str]:
    """Where the server is ahead of its baseline, and where it is not any more."""
    rows = [finding.figures for finding in findings]
    lines = [COUNTED] if any(row["tokens_per_second"] is None for row in rows) else []
    compared = [row for row in rows if row["speedups"]]
    if not compared:
        return [*lines, NO_BASELINE] if all(row["baseline"] is None for row in rows) else lines
    lines += [_sentence(verdict, compared) for verdict in SENTENCES if verdict in _verdicts(compared)]
    lines += _crossing(compared)
    if any(row["verdict"] == FASTER and not row["drafted"] for row in compared):
        lines.append(OTHER_REASON.format(compared[0]["server"]))
    if all(row["drafted"] and not row["accepted"] for row in compared):
        lines.append(SAVED_NOTHING)
    notes = dict.fromkeys(note for row in compared for note in row["acceptance_notes"])
    return [
        *lines,
        *(f"Acceptance: {note}." for note in notes),
        MORE_TURNS if TOO_FEW in _verdicts(compared) else SAMPLE,
    ]


def _verdicts(rows: Sequence[Row]) -> set[str]:
    return {row["verdict"] for row in rows}


def _sentence(verdict: str, rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if row["verdict"] == verdict]
    about = "about " if verdict == TOO_FEW else ""
    loads = ", ".join(f"{row['concurrency']} ({about}{speedup_text(row)})" for row in chosen)
    return SENTENCES[verdict].format(server=chosen[0]["server"], baseline=chosen[0]["baseline"], loads=loads)


def _crossing(rows: Sequence[Row]) -> list[str]:
    """Between which loads speculation stops paying: the highest with a gain, and the next one with a loss.

    A load at which neither is measured shows no loss, so it gets a sentence of its own.
    """
    last = max((index for index, row in enumerate(rows) if row["verdict"] == FASTER), default=None)
    if last is None:
        return []
    later = [row for row in rows[last + 1 :] if row["verdict"] != TOO_FEW]
    slower = next((row for row in later if row["verdict"] == SLOWER), None)
    if slower is not None:
        return [STOPS.format(rows[last]["concurrency"], slower["concurrency"])]
    return [NO_GAIN.format(count_of(rows[last]["concurrency"], "request"))] if later else []


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
