"""Draws charts as plain text of at most ten lines, for a terminal.

The last line counts what does not fit. Pages are left to `utils.screen.svg_charts`.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch
from statistics import median
from string import ascii_lowercase

from utils.comparison.charts import (
    TARGET_ONLY,
    BarChart,
    Chart,
    DotChart,
    DotRow,
    LineChart,
    StackedChart,
    shortened_text,
)

HEIGHT = 10  # lines of a plot, including title and legend
MIN_WIDTH, MAX_WIDTH = 40, 100  # in characters
MAX_LABEL = 28
AXIS = 7  # characters for the labels of a vertical axis
SIGNS = "*o+x#@%&" + "".join(letter for letter in ascii_lowercase if letter not in "ox")
REFERENCE, INTERVAL, DOT, MEDIAN = ":", "-", "o", "|"
PART_SIGNS = "#=.~"
MAX_THICKNESS = 3  # of a bar, in characters


def text_plot(chart: Chart, *, width: int) -> str:
    """The chart in lines of at most `width` characters."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    return "\n".join([shortened_text(chart.title, width), *(line.rstrip() for line in _lines(chart, width))])


@singledispatch
def _lines(chart: Chart, width: int) -> Iterator[str]:
    """The lines below the title."""
    raise TypeError(type(chart))


@_lines.register
def _dot_lines(chart: DotChart, width: int) -> Iterator[str]:
    shown = chart.rows[: HEIGHT - 3]
    label, last = _label_width(row.label for row in shown), max(len(_figure(row)) for row in shown)
    room = width - label - last - 2
    scale = Scale.over([*_all_values(chart.rows), *_reference(chart)], room)
    for row in shown:
        yield f"{shortened_text(row.label, label):<{label}} {_dots(row, chart, scale)} {_figure(row):>{last}}"
    yield " " * (label + 1) + scale.line(chart.reference)
    signs = [f"{DOT} measured", f"{MEDIAN} median", f"[{INTERVAL}] 95 % interval" if _has_intervals(chart) else ""]
    signs += [f"{REFERENCE} {chart.about}" if chart.reference is not None else ""]
    yield from _legend([chart.x_label, *filter(None, signs)], width, left_out=len(chart.rows) - len(shown))


def _dots(row: DotRow, chart: DotChart, scale: "Scale") -> str:
    cells = [" "] * scale.room
    for value in _reference(chart):
        cells[scale.column(value)] = REFERENCE
    if row.interval is not None:
        low, high = map(scale.column, row.interval)
        cells[low : high + 1] = INTERVAL * (high + 1 - low)
    for value in row.values:
        cells[scale.column(value)] = DOT
    if row.interval is not None:
        cells[low], cells[high] = "[", "]"
    if len(row.values) > 1:
        cells[scale.column(median(row.values))] = MEDIAN
    return "".join(cells)


def _figure(row: DotRow) -> str:
    return row.figure or (f"{median(row.values):.2f}" if row.values else "-")


def _all_values(rows: Sequence[DotRow]) -> Iterator[float]:
    for row in rows:
        yield from row.values
        yield from row.interval or ()


def _reference(chart: DotChart | LineChart) -> list[float]:
    return [] if chart.reference is None else [chart.reference]


def _has_intervals(chart: DotChart) -> bool:
    return any(row.interval is not None for row in chart.rows)


@_lines.register
def _line_lines(chart: LineChart, width: int) -> Iterator[str]:
    names = [*(f"{sign} {name}" for name, sign in zip(chart.series, SIGNS, strict=False))]
    markers = dict.fromkeys(f"{marker.name[0].upper()} {marker.name}" for marker in chart.markers)
    names += [*markers, *([f"{INTERVAL} {TARGET_ONLY}"] if chart.reference is not None else [])]
    legend = list(_legend([chart.x_label, *names], width, left_out=max(0, len(chart.series) - len(SIGNS))))
    height, room = HEIGHT - 2 - len(legend), width - AXIS - 1
    values = [value for row in chart.series.values() for value in row if value is not None]
    scale = Scale.over([*values, *(marker.y for marker in chart.markers), *_reference(chart)], height)
    columns = Scale(0, max(1, len(chart.ticks) - 1), room)
    grid = [[" "] * room for _ in range(height)]
    for value in _reference(chart):
        grid[scale.column(value)] = [INTERVAL] * room
    for row, sign in zip(chart.series.values(), SIGNS, strict=False):
        for column, value in _curve(row, columns):
            grid[scale.column(value)][column] = sign
    for marker in chart.markers:
        grid[scale.column(marker.y)][columns.column(marker.x)] = marker.name[0].upper()
    yield from _framed(grid, scale)
    yield " " * (AXIS + 1) + _ticks(chart.ticks, [columns.column(index) for index in range(len(chart.ticks))], room)
    yield from legend


def _curve(row: Sequence[float | None], columns: "Scale") -> Iterator[tuple[int, float]]:
    """(column, value) from point to neighbouring point."""
    for index, value in enumerate(row):
        if value is None:
            continue
        start, after = columns.column(index), row[index + 1] if index + 1 < len(row) else None
        yield start, value
        if after is not None:
            end = columns.column(index + 1)
            for column in range(start + 1, end):
                yield column, value + (after - value) * (column - start) / (end - start)


@_lines.register
def _bar_lines(chart: BarChart, width: int) -> Iterator[str]:
    series, room = list(zip(chart.series.values(), SIGNS, strict=False)), width - AXIS - 1
    count = max(1, min(len(chart.ticks), room // (len(series) + 1)))
    thickness = max(1, min(MAX_THICKNESS, (room // count - 1) // len(series)))
    group = thickness * len(series) + 1
    names = [f"{sign} {name}" for name, sign in zip(chart.series, SIGNS, strict=False)]
    left_out = len(chart.series) - len(series) + len(chart.ticks) - count
    legend = list(_legend([chart.x_label, *names], width, left_out=left_out))
    height = HEIGHT - 2 - len(legend)
    grid = [[" "] * room for _ in range(height)]
    for place, (row, sign) in enumerate(series):
        for tick, value in enumerate(row[:count]):
            for level, cell in enumerate(_bar(value, sign, height)):
                start = tick * group + place * thickness
                grid[level][start : start + thickness] = cell * thickness
    yield from _framed(grid, Scale(0, 1, height))
    yield " " * (AXIS + 1) + _ticks(chart.ticks[:count], [tick * group for tick in range(count)], room)
    yield from legend


def _bar(value: float | None, sign: str, height: int) -> str:
    """The cells of a bar, from below. A bar of height 0 differs from a missing one."""
    return "" if value is None else sign * round(value * height) or "_"


@_lines.register
def _stacked_lines(chart: StackedChart, width: int) -> Iterator[str]:
    shown = chart.labels[: HEIGHT - 2]
    totals = [sum(parts) for parts in zip(*chart.parts.values(), strict=True)]
    label, numbers = _label_width(shown), [f"{total:.2f}" for total in totals]
    last, longest = max(map(len, numbers)), max(totals) or 1.0
    room = width - label - last - 2
    for index, name in enumerate(shown):
        bar, end = "", 0.0
        for row, sign in zip(chart.parts.values(), PART_SIGNS, strict=False):
            end += row[index]  # round the ends, not the lengths, so that errors do not add up
            bar += sign * (round(end / longest * room) - len(bar))
        yield f"{shortened_text(name, label):<{label}} {bar:<{room}} {numbers[index]:>{last}}"
    signs = (f"{sign} {name}" for name, sign in zip(chart.parts, PART_SIGNS, strict=False))
    yield from _legend([chart.x_label, *signs], width, left_out=len(chart.labels) - len(shown))


class Scale:
    """Maps values from `low` to `high` to `room` cells."""

    def __init__(self, low: float, high: float, room: int) -> None:
        self.low, self.high, self.room = low, high, room

    @classmethod
    def over(cls, values: Sequence[float], room: int) -> "Scale":
        """A scale for all values, with a margin if they are all equal."""
        low, high = min(values), max(values)
        margin = 0.0 if low < high else abs(low) * 0.1 or 1.0
        return cls(low - margin, high + margin, room)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def column(self, value: float) -> int:
        return round((value - self.low) / (self.high - self.low) * (self.room - 1))

    def line(self, reference: float | None) -> str:
        """The lowest and the highest value, and the reference if there is room."""
        left, right = f"{self.low:.2f}", f"{self.high:.2f}"
        text = left + " " * (self.room - len(left) - len(right)) + right
        if reference is None:
            return text
        shown = f"{reference:.2f}"
        start = self.column(reference) - len(shown) // 2
        if text[max(0, start - 1) : start + len(shown) + 1].strip() or start < 0:
            return text
        return text[:start] + shown + text[start + len(shown) :]


def _framed(grid: Sequence[Sequence[str]], scale: Scale) -> Iterator[str]:
    """Rows from the top, with the highest and the lowest value on the left."""
    for level in reversed(range(len(grid))):
        value = {len(grid) - 1: f"{scale.high:.2f}", 0: f"{scale.low:.2f}"}.get(level, "")
        yield f"{value:>{AXIS - 1}} |{''.join(grid[level])}"


def _ticks(ticks: Sequence[str], columns: Sequence[int], room: int) -> str:
    """As many ticks as fit, at their columns."""
    line = ""
    for tick, column in zip(ticks, columns, strict=True):
        column = min(column, room - len(tick))
        if not line or column > len(line):
            line = line.ljust(column) + tick
    return line


def _label_width(labels: Iterable[str]) -> int:
    return min(MAX_LABEL, max(map(len, labels)))


def _legend(parts: Sequence[str], width: int, *, left_out: int) -> Iterator[str]:
    """The meaning of the signs, in at most two lines, and how much does not fit."""
    rest = f"{left_out} more in /export report.html" if left_out > 0 else ""
    lines = [""]
    for index, part in enumerate(parts):
        if len(lines[-1]) + len(part) + 2 > width:
            if len(lines) == 2:
                rest = f"{left_out + len(parts) - index} more in /export report.html"
                break
            lines.append("")
        lines[-1] += f"{part}  "
    if rest:
        lines[-1] = shortened_text(lines[-1].rstrip(), width - len(rest) - 2) + f"  {rest}"
    yield from lines
