"""Charts as plain values: what a report or the runs of a prompt show as a plot. `utils.screen` draws them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import geometric_mean
from typing import Any

from utils.comparison.speed_claims import speedup_text

Record = Mapping[str, Any]
BASELINE, TARGET_ONLY = "target", "target-only"  # its name in records and on the screen
MIN_VALUES = 3  # with fewer, an interval is wider than the chart


@dataclass(frozen=True, slots=True)
class DotRow:
    """Repeated measurements of one thing.

    `interval` is the confidence interval of their mean. Rows of one `series` share a colour. `figure` is the value in
    the table, by default the median.
    """

    label: str
    values: Sequence[float]
    interval: tuple[float, float] | None = None
    series: str = ""
    figure: str = ""


@dataclass(frozen=True, slots=True)
class DotChart:
    """A row of dots for each measured thing. `reference` is a value to compare with, `about` describes it."""

    title: str
    x_label: str
    rows: Sequence[DotRow]
    reference: float | None = None
    about: str = TARGET_ONLY


@dataclass(frozen=True, slots=True)
class Marker:
    """A labelled point beside the line of its series, such as `auto`. `x` counts ticks."""

    name: str
    series: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class LineChart:
    """One line per series over common ticks, starting at the first tick. A value of None leaves a gap."""

    title: str
    x_label: str
    ticks: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    markers: Sequence[Marker] = ()
    reference: float | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """A group of bars for each tick, one bar per series, from 0 to 1. A value of None leaves a gap.

    `counts` holds the fraction behind each value, such as 3/4.
    """

    title: str
    x_label: str
    ticks: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    counts: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StackedChart:
    """A bar for each label that consists of parts."""

    title: str
    x_label: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]


Chart = DotChart | LineChart | BarChart | StackedChart


def repeats_chart(findings: Sequence[tuple[str, Record]], each: str = "run", over: str = TARGET_ONLY) -> DotChart:
    """The speed-up of each run or prompt, or the throughput of each run if the target alone did not run.

    Each finding has a label and the figures of repeated runs. `each` describes a dot, `over` the baseline of the
    speed-ups.
    """
    rows = [
        DotRow(label, values, _interval(values, row["interval"]), row["strategy"], speedup_text(row))
        for label, row in findings
        if row["strategy"] != BASELINE and (values := _speedups(row))
    ]
    if rows:
        return DotChart(f"speed-up over {over}, one dot per {each}", "speed-up", rows, 1.0, over)
    speeds = [DotRow(label, row["tokens_per_second"], series=row["strategy"]) for label, row in findings]
    return DotChart("throughput, one dot per run", "tokens/s", speeds)


def _speedups(row: Record) -> list[float]:
    """The speed-ups of the prompts if there are several, otherwise of the runs."""
    by_prompt = row.get("speedups_by_prompt", ())
    if len(by_prompt) > 1:
        return [geometric_mean(group) for group in by_prompt]
    return [speedup for speedup in row["speedups"] if speedup]


def _interval(values: Sequence[float], interval: Sequence[float] | None) -> tuple[float, float] | None:
    return (interval[0], interval[1]) if interval is not None and len(values) >= MIN_VALUES else None


def acceptance_chart(rates: Mapping[str, Sequence[float | None]]) -> Iterator[BarChart]:
    """Acceptance by position, by strategy. No chart if nothing was drafted."""
    rates = {name: row for name, row in rates.items() if row}
    if rates:
        columns = list(zip_longest(*rates.values()))
        series = {name: [column[index] for column in columns] for index, name in enumerate(rates)}
        ticks = [str(position + 1) for position in range(len(columns))]
        yield BarChart("acceptance by position", "position in the round", ticks, series)


def time_chart(seconds: Mapping[str, Mapping[str, float]]) -> Iterator[StackedChart]:
    """Seconds by strategy for each part of a run. No chart without a strategy."""
    if seconds:
        names = dict.fromkeys(part for parts in seconds.values() for part in parts)
        parts = {name: [row.get(name, 0.0) for row in seconds.values()] for name in names}
        yield StackedChart("where the time went", "seconds", list(seconds), parts)


def prompt_charts(records: Sequence[Record]) -> list[Chart]:
    """The charts of the runs of one prompt, from their records. Servers do not say where their time goes."""
    records = [row for row in records if not row.get("server")]
    rates = {
        row["strategy"]: [accepted / tried if tried else None for accepted, tried in row["accepted_by_position"] or ()]
        for row in records
    }
    # If no run drafts, there is no time to split.
    drafting = any(row["draft_seconds"] is not None for row in records)
    seconds = {row["strategy"]: _seconds(row) for row in records if drafting}
    counts = {
        row["strategy"]: [f"{accepted}/{tried}" for accepted, tried in row["accepted_by_position"] or ()]
        for row in records
    }
    return [*(replace(chart, counts=counts) for chart in acceptance_chart(rates)), *time_chart(seconds)]


def _seconds(row: Record) -> dict[str, float]:
    drafting, verifying = row["draft_seconds"], row["verify_seconds"]
    if drafting is None or verifying is None:
        return {"not split": row["seconds"]}
    other = max(0.0, row["seconds"] - drafting - verifying)
    return {"draft": drafting, "verify": verifying, "other": other}


def shortened_text(text: str, length: int) -> str:
    """The text, or its beginning and three dots."""
    return text if len(text) <= length else text[: length - 3].rstrip() + "..."
