"""Draws charts as SVG elements inside an HTML page, without styles, ids or links, in the colour of the page's text.

Charts for terminals are left to `utils.screen.plots`.
"""

from collections.abc import Mapping, Sequence
from functools import singledispatch
from html import escape
from statistics import median

from utils.comparison.charts import TARGET_ONLY, BarChart, Chart, DotChart, LineChart, StackedChart, shortened_text
from utils.screen.plots import Scale
from utils.text import visible

# Heights in pixels: of the title, a row, an area with a vertical axis, the text below an area, and a legend's line.
TOP, ROW, HEIGHT, BELOW, LINE = 30, 26, 200, 46, 18
LEFT, AREA, LEGEND = 200, 450, 230  # widths: labels or a vertical axis, the area, and the legend at the right
MAX_LABEL, MAX_TITLE = 28, 80  # characters
COLOURS = ("#3b82c4", "#d97706", "#2a9d5c", "#a855c7", "#dc4c4c", "#0d9ba8", "#8a6d3b", "#d6488f")
DASHES = ("none", "6 3", "2 3", "8 3 2 3")  # of curves, if there are more curves than colours
GREY = "#888888"

# The elements, the lower edge of the area, and the legend (colours by name).
Drawing = tuple[list[str], int, Mapping[str, str]]


def svg_chart(chart: Chart) -> str:
    """The chart as an SVG element."""
    elements, bottom, legend = _drawing(chart)
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
    shown = escape(shortened_text(visible(text).replace("\n", " "), length))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{shown}</text>'


def _rect(box: tuple[float, float, float, float], colour: str, *, opacity: float = 1.0, title: str = "") -> str:
    """A rectangle. `box` is x, y, width and height. Browsers show `title` under the mouse pointer."""
    x, y, width, height = (f"{value:.1f}" for value in box)
    about = f'x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}" fill-opacity="{opacity}"'
    return f"<rect {about}><title>{escape(visible(title))}</title></rect>" if title else f"<rect {about}/>"


def _dot(x: float, y: float, radius: float, colour: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}" fill-opacity="0.7"/>'


def _line(path: str, colour: str = GREY, dashes: str = "none", width: float = 1.0) -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(dict.fromkeys(names))}


def _reference(chart: DotChart | LineChart) -> list[float]:
    return [] if chart.reference is None else [chart.reference]


def _rows(labels: Sequence[str], scale: Scale) -> tuple[list[str], int]:
    """The labels of rows, a horizontal axis, and its height."""
    bottom = TOP + ROW * len(labels)
    elements = [_text(LEFT - 10, TOP + ROW * index + 17, label, "end") for index, label in enumerate(labels)]
    for value in (scale.low, scale.middle, scale.high):
        x = LEFT + scale.column(value)
        elements += (_line(f"M{x} {TOP}V{bottom}", width=0.3), _text(x, bottom + 16, f"{value:.2f}"))
    return elements, bottom


def _columns(ticks: Sequence[str], places: Sequence[float], scale: Scale) -> list[str]:
    """A vertical axis, and as many ticks below the area as fit."""
    elements: list[str] = []
    for value in (scale.low, scale.middle, scale.high):
        y = TOP + HEIGHT - scale.column(value)
        elements += (_line(f"M{LEFT} {y}h{AREA}", width=0.3), _text(LEFT - 8, y + 4, f"{value:.2f}", "end"))
    every = 1 + len(ticks) * 8 * min(MAX_LABEL, max(map(len, ticks))) // AREA
    shown = list(zip(ticks, places, strict=True))[::every]
    return elements + [_text(LEFT + x, TOP + HEIGHT + 16, tick) for tick, x in shown]


@singledispatch
def _drawing(chart: Chart) -> Drawing:
    raise TypeError(type(chart))


@_drawing.register
def _dots(chart: DotChart) -> Drawing:
    values = [value for row in chart.rows for value in (*row.values, *(row.interval or ()))]
    scale = Scale.over([*values, *_reference(chart)], AREA)
    colours = _colours([row.series or row.label for row in chart.rows])
    elements, bottom = _rows([row.label for row in chart.rows], scale)
    for value in _reference(chart):
        elements.append(_line(f"M{LEFT + scale.column(value)} {TOP}V{bottom}", dashes="5 4"))
    for index, row in enumerate(chart.rows):
        y, colour = TOP + ROW * index + 13, colours[row.series or row.label]
        if row.interval is not None:
            low, high = map(scale.column, row.interval)
            elements.append(_rect((LEFT + low, y - 5, high - low, 10), colour, opacity=0.3))
        elements += (_dot(LEFT + scale.column(value), y, 3.5, colour) for value in row.values)
        if len(row.values) > 1:
            elements.append(_rect((LEFT + scale.column(median(row.values)) - 1, y - 9, 2, 18), colour))
    return elements, bottom, {chart.about: GREY} if _reference(chart) else {}


@_drawing.register
def _curves(chart: LineChart) -> Drawing:
    values = [value for row in chart.series.values() for value in row if value is not None]
    highest = max([*values, *(marker.y for marker in chart.markers), *_reference(chart)])
    scale = Scale(0.0, highest or 1.0, HEIGHT)  # from 0, so that heights show ratios
    columns = Scale(0.0, max(1, len(chart.ticks) - 1), AREA)
    colours = _colours(list(chart.series))
    elements = _columns(chart.ticks, [columns.column(index) for index in range(len(chart.ticks))], scale)
    for value in _reference(chart):
        elements.append(_line(f"M{LEFT} {TOP + HEIGHT - scale.column(value)}h{AREA}", dashes="5 4"))
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
    return elements, TOP + HEIGHT, colours | ({TARGET_ONLY: GREY} if _reference(chart) else {})


@_drawing.register
def _bars(chart: BarChart) -> Drawing:
    scale, colours = Scale(0.0, 1.0, HEIGHT), _colours(list(chart.series))
    group = AREA / len(chart.ticks)
    width = 0.8 * group / len(chart.series)
    elements = _columns(chart.ticks, [group * (tick + 0.5) for tick in range(len(chart.ticks))], scale)
    for place, (name, values) in enumerate(chart.series.items()):
        counts = chart.counts.get(name, [""] * len(values))
        for tick, (value, count) in enumerate(zip(values, counts, strict=False)):
            if value is not None:
                x, height = LEFT + group * (tick + 0.1) + width * place, scale.column(value)
                elements.append(_rect((x, TOP + HEIGHT - height, width, height), colours[name], title=count))
    return elements, TOP + HEIGHT, colours


@_drawing.register
def _stack(chart: StackedChart) -> Drawing:
    ends = [0.0] * len(chart.labels)
    scale = Scale(0.0, max(sum(parts) for parts in zip(*chart.parts.values(), strict=True)) or 1.0, AREA)
    colours, (elements, bottom) = _colours(list(chart.parts)), _rows(chart.labels, scale)
    for name, values in chart.parts.items():
        for index, value in enumerate(values):
            start, ends[index] = scale.column(ends[index]), ends[index] + value
            width = scale.column(ends[index]) - start  # round the ends, so that errors do not add up
            elements.append(_rect((LEFT + start, TOP + ROW * index + 5, width, ROW - 10), colours[name]))
    return elements, bottom, colours
