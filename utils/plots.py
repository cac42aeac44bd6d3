"""Charts: drawn as plain text for a terminal, or as a PNG for a page."""

from io import BytesIO

import plotext

from utils.reports import Chart

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
        plotext.plot(list(places[: len(values)]), list(values), marker=sign, label=name)
        best = max(range(len(values)), key=values.__getitem__)
        tops.append((best, values[best]))
    plotext.scatter([place for place, _ in tops], [value for _, value in tops], marker="^", label="the best of each")
    plotext.xticks(list(places), list(chart.ticks))
    plotext.title(chart.title)
    plotext.xlabel(chart.below)
    drawn: str = plotext.build()
    return "\n".join(line.rstrip() for line in plotext.uncolorize(drawn).splitlines())


def line_png(chart: Chart) -> bytes:
    """The same as a picture."""
    from matplotlib.figure import Figure  # half a second, for those who want it

    figure = Figure(figsize=INCHES, dpi=DOTS, layout="constrained")
    axes = figure.add_subplot()
    for (name, values), sign in zip(chart.series.items(), "os^Dv*Px", strict=False):
        best = max(range(len(values)), key=values.__getitem__)
        (line,) = axes.plot(range(len(values)), values, marker=sign, markersize=4, label=name.replace("$", r"\$"))
        axes.plot([best], [values[best]], marker=sign, markersize=10, color=line.get_color())
    axes.set_xticks(range(len(chart.ticks)), [tick.replace("$", r"\$") for tick in chart.ticks])
    axes.set(title=chart.title, xlabel=chart.below, ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    made = BytesIO()
    figure.savefig(made, format="png")
    return made.getvalue()
