"""Draws charts: as plain text of at most ten lines for a terminal, and as SVG for a page.

The last line of a text counts what does not fit. An SVG drops nothing. It has no styles, ids or links, and the colour
of the page's text.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from statistics import median
from string import ascii_lowercase
from textwrap import wrap

from utils.comparison.charts import TARGET_ONLY, Chart, DotChart, DotRow, LineChart
from utils.text import visible

LINES = 10  # of a text, including title and legend
MIN_WIDTH, MAX_WIDTH = 40, 100  # of a text in characters
AXIS = 7  # characters for the labels of a vertical axis
MAX_LABEL, MAX_TITLE = 28, 80  # characters
SIGNS = "*o+x#@%&" + "".join(letter for letter in ascii_lowercase if letter not in "ox")
ELSEWHERE = "in /export report.html"
REFERENCE, INTERVAL, DOT, MEDIAN = ":", "-", "o", "|"

# Pixels of an SVG. Heights: of the title, a row, an area with a vertical axis, the text below it, a legend's line.
TOP, ROW, HEIGHT, BELOW, LINE = 30, 26, 200, 46, 18
LEFT, AREA, LEGEND = 200, 450, 230  # widths: labels or a vertical axis, the area, and the legend at the right
COLOURS = ("#3b82c4", "#d97706", "#2a9d5c", "#a855c7", "#dc4c4c", "#0d9ba8", "#8a6d3b", "#d6488f")
DASHES = ("none", "6 3", "2 3", "8 3 2 3")  # of curves, if there are more curves than colours
GREY = "#888888"

# The elements, the lower edge of the area, and the legend (colours by name).
Drawing = tuple[list[str], int, Mapping[str, str]]


def _values(chart: Chart) -> list[float]:
    """All values that a chart shows, the reference included."""
    reference = [] if chart.reference is None else [chart.reference]
    if isinstance(chart, DotChart):
        return [*reference, *chain(*((*row.values, *(row.interval or ())) for row in chart.rows))]
    curves = (value for row in chart.series.values() for value in row if value is not None)
    return [*reference, *curves, *(marker.y for marker in chart.markers)]


def _shortened(text: str, length: int = MAX_LABEL) -> str:
    """The text, or its beginning and three dots."""
    return text if len(text) <= length else text[: length - 3].rstrip() + "..."


def text_plot(chart: Chart, *, width: int) -> str:
    """The chart in lines of at most `width` characters."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    lines = _dot_lines(chart, width) if isinstance(chart, DotChart) else _curve_lines(chart, width)
    return "\n".join([_shortened(chart.title, width), *(line.rstrip() for line in lines)])


def _dot_lines(chart: DotChart, width: int) -> Iterator[str]:
    shown = chart.rows[: LINES - 4]  # the others are title, axis and legend
    label = min(MAX_LABEL, max(len(row.label) for row in shown))
    last = max(len(_figure(row)) for row in shown)
    scale = Scale.over(_values(chart), width - label - last - 2)
    for row in shown:
        yield f"{_shortened(row.label, label):<{label}} {_dots(row, chart, scale)} {_figure(row):>{last}}"
    yield " " * (label + 1) + scale.axis
    has_intervals = any(row.interval is not None for row in chart.rows)
    signs = [f"{DOT} measured", f"{MEDIAN} median", *([f"[{INTERVAL}] 95 % interval"] if has_intervals else [])]
    signs += [f"{REFERENCE} {chart.about}"] if chart.reference is not None else []
    yield from _legend([chart.x_label, *signs], width, len(chart.rows) - len(shown))


def _dots(row: DotRow, chart: DotChart, scale: "Scale") -> str:
    cells = [" "] * scale.room
    if chart.reference is not None:
        cells[scale.column(chart.reference)] = REFERENCE
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


def _curve_lines(chart: LineChart, width: int) -> Iterator[str]:
    names = [*(f"{sign} {name}" for name, sign in zip(chart.series, SIGNS, strict=False))]
    markers = dict.fromkeys(f"{marker.name[0].upper()} {marker.name}" for marker in chart.markers)
    names += [*markers, *([f"{INTERVAL} {TARGET_ONLY}"] if chart.reference is not None else [])]
    legend = _legend([chart.x_label, *names], width, len(chart.series) - len(SIGNS))
    height, room = LINES - 2 - len(legend), width - AXIS - 1
    scale = Scale.over(_values(chart), height)
    columns = Scale(0, max(1, len(chart.ticks) - 1), room)
    grid = [[" "] * room for _ in range(height)]
    if chart.reference is not None:
        grid[scale.column(chart.reference)] = [INTERVAL] * room
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

    @property
    def axis(self) -> str:
        """The lowest and the highest value below the cells."""
        low = f"{self.low:.2f}"
        return f"{low}{self.high:{self.room - len(low)}.2f}"


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


def _legend(parts: Sequence[str], width: int, left_out: int) -> list[str]:
    """The meaning of the signs, in at most two lines, and what does not fit."""
    shown = [*parts, *([f"{left_out} more {ELSEWHERE}"] if left_out > 0 else [])]
    # The blanks of a part do not end a line.
    text = "  ".join(part.replace(" ", "\xa0") for part in shown)
    lines = wrap(text, width, max_lines=2, placeholder=f"  more {ELSEWHERE}", break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def svg_chart(chart: Chart) -> str:
    """The chart as an SVG element."""
    elements, bottom, legend = _drawn_dots(chart) if isinstance(chart, DotChart) else _drawn_curves(chart)
    signs = " (line: median, band: 95 % interval of the mean)" if isinstance(chart, DotChart) else ""
    elements.append(_text(0, 14, chart.title, "start", length=MAX_TITLE))
    elements.append(_text(LEFT, bottom + 38, chart.x_label + signs, "start", length=MAX_TITLE))
    for index, (name, colour) in enumerate(legend.items()):
        x, y = LEFT + AREA + 30, TOP + LINE * index
        elements += (_rect((x, y, 10, 10), colour), _text(x + 16, y + 10, name, "start"))
    width, height = LEFT + AREA + LEGEND, max(bottom + BELOW, TOP + LINE * len(legend))
    about = f'role="img" aria-label="{escape(visible(chart.title))}" viewBox="0 0 {width} {height}" width="{width}"'
    return f'<svg {about} font-size="12" fill="currentColor">{"".join(elements)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle", *, length: int = MAX_LABEL) -> str:
    shown = escape(_shortened(visible(text).replace("\n", " "), length))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{shown}</text>'


def _rect(box: tuple[float, float, float, float], colour: str, opacity: float = 1.0) -> str:
    """A rectangle. `box` is x, y, width and height."""
    x, y, width, height = (f"{value:.1f}" for value in box)
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}" fill-opacity="{opacity}"/>'


def _dot(x: float, y: float, radius: float, colour: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}" fill-opacity="0.7"/>'


def _line(path: str, colour: str = GREY, dashes: str = "none", width: float = 1.0) -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(dict.fromkeys(names))}


def _columns(ticks: Sequence[str], places: Sequence[float], scale: Scale) -> list[str]:
    """A vertical axis, and as many ticks below the area as fit."""
    elements: list[str] = []
    for value in (scale.low, scale.middle, scale.high):
        y = TOP + HEIGHT - scale.column(value)
        elements += (_line(f"M{LEFT} {y}h{AREA}", width=0.3), _text(LEFT - 8, y + 4, f"{value:.2f}", "end"))
    every = 1 + len(ticks) * 8 * min(MAX_LABEL, max(map(len, ticks))) // AREA
    shown = list(zip(ticks, places, strict=True))[::every]
    return elements + [_text(LEFT + x, TOP + HEIGHT + 16, tick) for tick, x in shown]


def _drawn_dots(chart: DotChart) -> Drawing:
    scale, bottom = Scale.over(_values(chart), AREA), TOP + ROW * len(chart.rows)
    colours = _colours([row.series or row.label for row in chart.rows])
    elements = [_text(LEFT - 10, TOP + ROW * index + 17, row.label, "end") for index, row in enumerate(chart.rows)]
    for value in (scale.low, scale.middle, scale.high):
        x = LEFT + scale.column(value)
        elements += (_line(f"M{x} {TOP}V{bottom}", width=0.3), _text(x, bottom + 16, f"{value:.2f}"))
    if chart.reference is not None:
        elements.append(_line(f"M{LEFT + scale.column(chart.reference)} {TOP}V{bottom}", dashes="5 4"))
    for index, row in enumerate(chart.rows):
        y, colour = TOP + ROW * index + 13, colours[row.series or row.label]
        if row.interval is not None:
            low, high = map(scale.column, row.interval)
            elements.append(_rect((LEFT + low, y - 5, high - low, 10), colour, 0.3))
        elements += (_dot(LEFT + scale.column(value), y, 3.5, colour) for value in row.values)
        if len(row.values) > 1:
            elements.append(_rect((LEFT + scale.column(median(row.values)) - 1, y - 9, 2, 18), colour))
    return elements, bottom, {} if chart.reference is None else {chart.about: GREY}


def _drawn_curves(chart: LineChart) -> Drawing:
    scale = Scale(0.0, max(_values(chart)) or 1.0, HEIGHT)  # from 0, so that heights show ratios
    columns = Scale(0.0, max(1, len(chart.ticks) - 1), AREA)
    colours = _colours(list(chart.series))
    elements = _columns(chart.ticks, [columns.column(index) for index in range(len(chart.ticks))], scale)
    if chart.reference is not None:
        elements.append(_line(f"M{LEFT} {TOP + HEIGHT - scale.column(chart.reference)}h{AREA}", dashes="5 4"))
    for index, (name, row) in enumerate(chart.series.items()):
        path, start = "", "M"
        for tick, point in enumerate(row):
            if point is not None:
                x, y = LEFT + columns.column(tick), TOP + HEIGHT - scale.column(point)
                path += f"{start}{x} {y}"
                elements.append(_dot(x, y, 2.5, colours[name]))
            start = "M" if point is None else "L"
        elements.append(_line(path, colours[name], DASHES[index // len(COLOURS) % len(DASHES)], 1.6))
    for marker in chart.markers:
        x, y = LEFT + columns.column(marker.x), TOP + HEIGHT - scale.column(marker.y)
        elements += (_dot(x, y, 5, colours.get(marker.series, GREY)), _text(x, y - 8, marker.name))
    return elements, TOP + HEIGHT, colours | ({} if chart.reference is None else {TARGET_ONLY: GREY})
