"""Charts as plain values: what a report or the runs of a prompt show as a plot. `utils.screen` draws them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    interval: Sequence[float] | None = None
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


Chart = DotChart | LineChart


def repeats_chart(findings: Sequence[tuple[str, Record]], each: str = "run", over: str = TARGET_ONLY) -> DotChart:
    """The speed-up of each run or prompt, or the throughput of each run if the target alone did not run.

    Each finding has a label and the figures of repeated runs. `each` describes a dot, `over` the baseline of the
    speed-ups.
    """
    rows = [
        DotRow(
            *(label, values, row["interval"] if len(values) >= MIN_VALUES else None),
            *(row["strategy"], speedup_text(row)),
        )
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


def acceptance_chart(records: Sequence[Record]) -> Iterator[LineChart]:
    """Acceptance by position of the runs in these records. No chart if nothing was drafted."""
    positions = {row["strategy"]: row["accepted_by_position"] for row in records if row["accepted_by_position"]}
    if positions:
        ticks = [str(position + 1) for position in range(max(map(len, positions.values())))]
        series = {name: [part / whole if whole else None for part, whole in row] for name, row in positions.items()}
        yield LineChart("acceptance by position", "position in the round", ticks, series)
