"""Plots for a terminal, as plain text."""

from collections.abc import Mapping, Sequence

import plotext

HEIGHT, NARROWEST, WIDEST = 15, 40, 100


def line_plot(series: Mapping[str, Sequence[float]], *, title: str, below: str, width: int, start: int = 0) -> str:
    """A line for each series over start, start + 1, ...; the highest point of each is marked. No colours: signs tell them apart."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(max(width, NARROWEST), WIDEST), HEIGHT)
    longest = max(map(len, series.values()))
    places = range(start, start + longest)
    tops: list[tuple[int, float]] = []
    for (name, values), sign in zip(series.items(), "*ox+#@%&", strict=False):
        plotext.plot(list(places[: len(values)]), list(values), marker=sign, label=name)
        best = max(range(len(values)), key=values.__getitem__)
        tops.append((places[best], values[best]))
    plotext.scatter([place for place, _ in tops], [value for _, value in tops], marker="^", label="the best of each")
    plotext.xticks(list(places), [str(place) for place in places])
    plotext.title(title)
    plotext.xlabel(below)
    drawn: str = plotext.build()
    return "\n".join(line.rstrip() for line in plotext.uncolorize(drawn).splitlines())
