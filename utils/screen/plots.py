"""Charts: drawn as plain text for a terminal, or as a PNG for a page."""

from io import BytesIO
from operator import itemgetter
from typing import Any

import plotext

from utils.comparison.reports import Chart

HEIGHT, NARROWEST, WIDEST = 15, 40, 100
INCHES, DOTS = (7.0, 4.0), 150


def line_plot(chart: Chart, *, width: int) -> str:
    """A line for each series; the highest point of each is marked. No colours: signs tell them apart."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(max(width, NARROWEST), WIDEST), HEIGHT)
    places = range(len(chart.ticks))
    tops: list[tuple[int, float]] = []
    for (name, values), sign in zip(chart.series.items(), "*ox+#@%&", strict=False):
        points = [(place, value) for place, value in enumerate(values) if value is not None]
        plotext.plot(*map(list, zip(*points, strict=True)), marker=sign, label=name)
        tops.append(max(points, key=itemgetter(1)))
    plotext.scatter([place for place, _ in tops], [value for _, value in tops], marker="^", label="the best of each")
    plotext.xticks(list(places), list(chart.ticks))
    plotext.title(chart.title)
    plotext.xlabel(chart.below)
    drawn: str = plotext.build()
    return "\n".join(line.rstrip() for line in plotext.uncolorize(drawn).splitlines())


def line_png(chart: Chart) -> bytes:
    """The same as a picture."""
    made = BytesIO()
    drawn(chart).savefig(made, format="png")
    return made.getvalue()


def drawn(chart: Chart) -> Any:
    """A matplotlib figure."""
    from matplotlib.figure import Figure  # half a second, for those who want it

    figure = Figure(figsize=INCHES, dpi=DOTS, layout="constrained")
    axes = figure.add_subplot()
    for (name, values), sign in zip(chart.series.items(), "os^Dv*Px", strict=False):
        points = [(place, value) for place, value in enumerate(values) if value is not None]
        best, top = max(points, key=itemgetter(1))
        (line,) = axes.plot(*zip(*points, strict=True), marker=sign, markersize=4, label=name.replace("$", r"\$"))
        axes.plot([best], [top], marker=sign, markersize=10, color=line.get_color())
    axes.set_xticks(range(len(chart.ticks)), [tick.replace("$", r"\$") for tick in chart.ticks])
    axes.set(title=chart.title, xlabel=chart.below)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.margins(x=0.08)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
