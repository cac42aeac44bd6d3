"""Draws charts as plain text for a terminal, or as PNG."""

from collections.abc import Sequence
from io import BytesIO
from operator import itemgetter
from typing import Any

import plotext

from utils.comparison.reports import Chart

TEXT_HEIGHT, MIN_TEXT_WIDTH, MAX_TEXT_WIDTH = 15, 40, 100  # in characters
FIGURE_SIZE, DPI = (7.0, 4.0), 150  # in inches


def text_plot(chart: Chart, *, width: int) -> str:
    """A line for each series, with its own sign instead of a colour. The highest point of each is marked."""
    plotext.clear_figure()  # plotext draws on one global figure
    plotext.theme("clear")
    plotext.plot_size(min(max(width, MIN_TEXT_WIDTH), MAX_TEXT_WIDTH), TEXT_HEIGHT)
    peaks: list[tuple[int, float]] = []
    for (name, values), sign in zip(chart.series.items(), "*ox+#@%&", strict=False):
        points = _points(values)
        plotext.plot(*map(list, zip(*points, strict=True)), marker=sign, label=name)
        peaks.append(max(points, key=itemgetter(1)))
    plotext.scatter([x for x, _ in peaks], [y for _, y in peaks], marker="^", label="the best of each")
    plotext.xticks(list(range(len(chart.ticks))), list(chart.ticks))
    plotext.title(chart.title)
    plotext.xlabel(chart.x_label)
    plot: str = plotext.build()
    return "\n".join(line.rstrip() for line in plotext.uncolorize(plot).splitlines())


def png_plot(chart: Chart) -> bytes:
    """The chart as the bytes of a PNG file."""
    file = BytesIO()
    chart_figure(chart).savefig(file, format="png")
    return file.getvalue()


def chart_figure(chart: Chart) -> Any:
    """The chart as a matplotlib figure."""
    from matplotlib.figure import Figure  # imported here because it takes half a second

    figure = Figure(figsize=FIGURE_SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for (name, values), sign in zip(chart.series.items(), "os^Dv*Px", strict=False):
        points = _points(values)
        peak = max(points, key=itemgetter(1))
        # matplotlib would set text between two dollar signs as a formula.
        (line,) = axes.plot(*zip(*points, strict=True), marker=sign, markersize=4, label=name.replace("$", r"\$"))
        axes.plot(*peak, marker=sign, markersize=10, color=line.get_color())
    axes.set_xticks(range(len(chart.ticks)), [tick.replace("$", r"\$") for tick in chart.ticks])
    axes.set(title=chart.title, xlabel=chart.x_label)
    # From 0, so that heights show ratios of speeds, with room for the large marker of the peak.
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.margins(x=0.08)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def _points(values: Sequence[float | None]) -> list[tuple[int, float]]:
    """(index, value) of the values that exist."""
    return [(index, value) for index, value in enumerate(values) if value is not None]
