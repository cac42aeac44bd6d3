"""Draws charts as pictures: PNG, and SVG that looks the same in browsers and in other viewers.

Importing matplotlib takes half a second, so it is imported where something is drawn.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatch
from io import BytesIO
from statistics import median
from typing import Any

from utils.comparison.charts import TARGET_ONLY, BarChart, Chart, DotChart, LineChart, StackedChart, shortened_text
from utils.text import visible

WIDTH, HEIGHT, DPI = 7.0, 3.6, 150  # in inches
ROW_HEIGHT, FRAME_HEIGHT = 0.36, 1.5  # in inches, of charts with a row per label
COLOURS = ("#3b82c4", "#d97706", "#2a9d5c", "#a855c7", "#dc4c4c", "#0d9ba8", "#8a6d3b", "#d6488f")
GREY = "#888888"
SIGNS = "osD^v*Px"
LINES = ("-", "--", "-.", ":")  # for more series than colours
MAX_LABEL, MAX_TITLE, MAX_CAPTION = 40, 70, 110  # characters
DOT_SIGNS = " (stroke: median, band: 95 % interval of the mean)"
MAX_COUNTS = 32  # bars with a number above them
FONT = "DejaVu Sans"
STYLE: Any = {
    "svg.fonttype": "none",  # text remains text
    "svg.hashsalt": "chart",  # the same chart becomes the same file
    "text.parse_math": False,  # prompts may hold dollar signs
    "font.family": [FONT],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def png_plot(charts: Sequence[Chart], caption: str = "") -> bytes:
    """The charts, one below the other, as the bytes of a PNG file."""
    return _saved(charts, caption, "png")


def svg_plot(charts: Sequence[Chart], caption: str = "") -> str:
    """The charts as an SVG file."""
    # matplotlib names the font whose widths it has used. Viewers without it need a similar one.
    return _saved(charts, caption, "svg").decode("utf-8").replace(f"'{FONT}'", f"'{FONT}', Verdana, sans-serif")


def transparent_svg(chart: Chart) -> bytes:
    """The chart as SVG without a background."""
    return _saved([chart], "", "svg", transparent=True)


def _saved(charts: Sequence[Chart], caption: str, form: str, *, transparent: bool = False) -> bytes:
    file = BytesIO()
    with _style():
        # Without a date, so that the same chart becomes the same file.
        metadata = {"Date": None, "Creator": None} if form == "svg" else {}
        chart_figure(charts, caption).savefig(file, format=form, metadata=metadata, transparent=transparent)
    return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks are drawn as boxes
        yield


def chart_figure(charts: Sequence[Chart], caption: str = "") -> Any:
    """The charts as one matplotlib figure."""
    from matplotlib.figure import Figure

    heights = [_height(chart) for chart in charts]
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for chart, axes in zip(charts, panels, strict=True):
        _draw(chart, axes)
        axes.set_title(_clean(chart.title, MAX_TITLE), loc="left", fontsize=11)
        axes.set_xlabel(_clean(chart.x_label) + (DOT_SIGNS if isinstance(chart, DotChart) else ""))
    if caption:
        figure.suptitle(_clean(caption, MAX_CAPTION), x=0.01, ha="left", fontsize=7.5, color=GREY)
    return figure


def _height(chart: Chart) -> float:
    rows = len(chart.rows) if isinstance(chart, DotChart) else len(getattr(chart, "labels", ()))
    return FRAME_HEIGHT + ROW_HEIGHT * rows if rows else HEIGHT


def _clean(text: str, length: int = MAX_LABEL) -> str:
    return shortened_text(visible(text).replace("\n", " "), length)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


@singledispatch
def _draw(chart: Chart, axes: Any) -> None:
    """Draw a chart without its title."""
    raise TypeError(type(chart))


@_draw.register
def _draw_dots(chart: DotChart, axes: Any) -> None:
    names = dict.fromkeys(row.series or row.label for row in chart.rows)
    colours = {name: _colour(index) for index, name in enumerate(names)}
    for place, row in enumerate(chart.rows):
        colour = colours[row.series or row.label]
        if row.interval is not None:
            axes.hlines(place, *row.interval, color=colour, linewidth=7, alpha=0.25)
        axes.scatter(row.values, [place] * len(row.values), s=22, color=colour, alpha=0.7, linewidths=0)
        if len(row.values) > 1:
            axes.plot(median(row.values), place, marker="|", markersize=15, markeredgewidth=2.5, color=colour)
    if chart.reference is not None:
        axes.axvline(chart.reference, color=GREY, linestyle="--", linewidth=1, label=chart.about)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_yticks(range(len(chart.rows)), [_clean(row.label) for row in chart.rows])
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.grid(axis="x", alpha=0.3)


@_draw.register
def _draw_lines(chart: LineChart, axes: Any) -> None:
    colours = {name: _colour(index) for index, name in enumerate(chart.series)}
    for index, (name, values) in enumerate(chart.series.items()):
        style = LINES[index // len(COLOURS) % len(LINES)]
        points = [float("nan") if value is None else value for value in values]
        axes.plot(range(len(points)), points, style, marker=".", color=colours[name], label=_clean(name))
    shapes = dict(zip(dict.fromkeys(marker.name for marker in chart.markers), SIGNS[1:], strict=False))
    for marker in chart.markers:
        label = _clean(f"{marker.series}, {marker.name}")
        colour, shape = colours.get(marker.series, GREY), shapes.get(marker.name, "x")
        axes.plot(marker.x, marker.y, shape, markersize=8, color=colour, markeredgecolor="white", label=label)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=GREY, linestyle="--", linewidth=1, label=TARGET_ONLY)
    axes.set_xticks(range(len(chart.ticks)), [_clean(tick) for tick in chart.ticks])
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])  # from 0, so that heights show ratios
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.grid(axis="y", alpha=0.3)


@_draw.register
def _draw_bars(chart: BarChart, axes: Any) -> None:
    width = 0.8 / len(chart.series)
    for index, (name, values) in enumerate(chart.series.items()):
        present = [(tick, value) for tick, value in enumerate(values) if value is not None]
        places = [tick + (index - (len(chart.series) - 1) / 2) * width for tick, _ in present]
        bars = axes.bar(places, [value for _, value in present], width, color=_colour(index), label=_clean(name))
        if name in chart.counts and len(chart.series) * len(chart.ticks) <= MAX_COUNTS:
            axes.bar_label(bars, [chart.counts[name][tick] for tick, _ in present], fontsize=5.5)
    axes.set_xticks(range(len(chart.ticks)), [_clean(tick) for tick in chart.ticks])
    axes.set_ylim(0, 1.04)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


@_draw.register
def _draw_stack(chart: StackedChart, axes: Any) -> None:
    ends = [0.0] * len(chart.labels)
    for index, (name, values) in enumerate(chart.parts.items()):
        axes.barh(range(len(ends)), values, left=ends, height=0.6, color=_colour(index), label=_clean(name))
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    axes.set_yticks(range(len(chart.labels)), [_clean(label) for label in chart.labels])
    axes.set_ylim(len(chart.labels) - 0.5, -0.5)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
