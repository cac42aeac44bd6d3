"""Charts as text and as SVG: the measured values at their places, nothing dropped silently, any text shown."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from utils.comparison.charts import (
    Chart,
    DotChart,
    DotRow,
    LineChart,
    Marker,
    acceptance_chart,
    repeats_chart,
)
from utils.screen.plots import AREA, HEIGHT, LEFT, LINES, ROW, SIGNS, TOP, svg_chart, text_plot

DOTS = DotChart(
    "speeds", "speed-up", [DotRow("one", [1.0, 1.5, 2.0], (1.2, 1.9)), DotRow("two", [1.1]), DotRow("none", [])], 1.0
)
CURVES = LineChart(
    "curves", "gamma", list("0123"), {"a": [1, 2, 3, 2], "b": [2, None, 1]}, [Marker("auto", "a", 1.5, 2.5)], 1.0
)
CHARTS = (DOTS, CURVES)


def many(count: int) -> list[Chart]:
    """Charts with this many rows or series."""
    names = [f"series number {index} with a long name" for index in range(count)]
    return [
        DotChart("dots", "x", [DotRow(name, [1.0, 2.0]) for name in names]),
        LineChart("lines", "x", list("01"), {name: [1.0, 2.0] for name in names}),
    ]


@pytest.mark.parametrize("width", [10, 40, 80, 400])
@pytest.mark.parametrize("chart", [*CHARTS, *many(9), *many(60)])
def test_a_plot_in_a_terminal_is_small(chart: Chart, width: int) -> None:
    lines = text_plot(chart, width=width).splitlines()
    assert len(lines) <= LINES == 10 and max(map(len, lines)) <= min(max(width, 40), 100)
    assert chart.title in lines[0] and not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("chart", many(60))
def test_what_does_not_fit_is_counted(chart: Chart) -> None:
    assert " more in /export" in text_plot(chart, width=80)


def test_every_series_has_its_own_sign() -> None:
    assert len(set(SIGNS)) == len(SIGNS) >= 20
    chart = LineChart("lines", "x", list("01"), {str(index): [index, index] for index in range(4)})
    drawn = "".join(line.partition("|")[2] for line in text_plot(chart, width=60).splitlines())
    assert all(drawn.count(sign) > 40 for sign in SIGNS[:4])


def test_repeats_are_dots_around_their_median() -> None:
    _, one, two, *_ = text_plot(DOTS, width=60).splitlines()
    assert "o" in one.removeprefix("one") and one.count("|") == 1 and one.rstrip().endswith("1.50") and "[" in one
    assert "|" not in two and two.rstrip().endswith("1.10")
    # The scale goes from 1 to 2, so the reference is its left end and the median its middle.
    assert one.index("|") == pytest.approx((one.index("o", 4) + one.rindex("o")) / 2, abs=1)


def drawn(chart: Chart, tag: str) -> list[dict[str, str]]:
    """The attributes of these elements of a chart as SVG."""
    return [dict(element.attrib) for element in ElementTree.fromstring(svg_chart(chart)).iter(tag)]


def words(chart: Chart) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg_chart(chart)).iter("text")]


def test_dots_of_a_page_are_at_the_measured_values() -> None:
    places = [(float(dot["cx"]) - LEFT) / (AREA - 1) + 1 for dot in drawn(DOTS, "circle")]
    assert places == pytest.approx([1.0, 1.5, 2.0, 1.1], abs=0.01)
    assert [float(dot["cy"]) for dot in drawn(DOTS, "circle")] == [TOP + 13] * 3 + [TOP + ROW + 13]
    band, median, _ = drawn(DOTS, "rect")
    assert float(band["width"]) == pytest.approx(0.7 * AREA, abs=2) and float(band["fill-opacity"]) < 1
    assert float(median["x"]) + 1 == pytest.approx(LEFT + AREA / 2, abs=1)
    assert {"one", "two", "none", "target-only"} <= set(words(DOTS))


def test_curves_of_a_page_have_gaps_and_markers() -> None:
    paths = [path["d"] for path in drawn(CURVES, "path") if path["stroke-width"] == "1.6"]
    assert [re.findall("[ML]", path) for path in paths] == [["M", "L", "L", "L"], ["M", "M"]]
    tops = [float(dot["cy"]) for dot in drawn(CURVES, "circle")]
    heights = [3 * (TOP + HEIGHT - top) / (HEIGHT - 1) for top in tops]
    assert heights == pytest.approx([1, 2, 3, 2, 2, 1, 2.5], abs=0.02), "from 0, and the marker last"
    assert {"auto", "target-only", "a", "b"} <= set(words(CURVES))


@pytest.mark.parametrize(
    "text", ["$x^2$ \\frac{", "<script>&amp;", "\x1b[31m\x00", "日本語 🙂", "a\nb", "x" * 999, '"']
)
def test_any_text_can_be_drawn(text: str) -> None:
    line = LineChart(text, text, [text], {text: [1.0]}, [Marker(text, text, 0, 1)])
    for chart in (line, DotChart(text, text, [DotRow(text, [1.0])])):
        svg = svg_chart(chart)
        ElementTree.fromstring(svg)
        assert "<script" not in svg and "\x1b" not in svg and len(svg) < 9000


@pytest.mark.parametrize("chart", [*CHARTS, *many(9), *many(60)])
def test_a_chart_of_a_page_drops_nothing_and_stays_inside(chart: Chart) -> None:
    root = ElementTree.fromstring(svg_chart(chart))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert all(
        0 <= float(word.attrib["x"]) < width and 0 < float(word.attrib["y"]) < height for word in root.iter("text")
    )
    assert not {name for element in root.iter() for name in element.attrib} & {"id", "style", "href", "class"}
    names = [row.label for row in chart.rows] if isinstance(chart, DotChart) else list(chart.series)
    assert len([word for word in words(chart) if word.startswith(tuple(name[:20] for name in names))]) >= len(names)


def figures(strategy: str, speedups: list[float], **changes: object) -> dict[str, object]:
    speeds = [10.0 * value for value in speedups]
    row = {"strategy": strategy, "speedups": speedups, "tokens_per_second": speeds, "interval": [1.3, 1.8]}
    return row | {"speedup": 1.52, "without_gain": False} | changes


def test_repeats_become_speed_ups_with_an_interval() -> None:
    target, fast, twice = figures("target", [1.0] * 5), figures("ngram", [1.4, 1.5, 1.6]), figures("x", [2.0, 2.1])
    chart = repeats_chart([(str(row["strategy"]), row) for row in (fast, target, twice)])
    assert [row.label for row in chart.rows] == ["ngram", "x"] and chart.reference == 1.0
    assert list(chart.rows[0].values) == [1.4, 1.5, 1.6] and chart.rows[1].interval is None
    assert chart.rows[0].interval == [1.3, 1.8] and text_plot(chart, width=80).splitlines()[1].endswith("1.52x")
    alone = repeats_chart([("drafter", figures("drafter", [], tokens_per_second=[5.0, 6.0]))])
    assert alone.reference is None and list(alone.rows[0].values) == [5.0, 6.0]


def test_several_prompts_are_a_dot_each() -> None:
    row = figures("x", [1.0, 4.0, 3.0], speedups_by_prompt=[[1.0, 4.0], [3.0]])
    assert repeats_chart([("x", row)], "prompt").rows[0].values == pytest.approx([2.0, 3.0])


def test_acceptance_by_position_is_a_curve() -> None:
    rows = {"speculative": [[3, 4], [1, 3], [0, 0]], "target": None, "ngram": [[1, 2]]}
    (chart,) = acceptance_chart([{"strategy": name, "accepted_by_position": row} for name, row in rows.items()])
    assert chart.series == {"speculative": [0.75, 1 / 3, None], "ngram": [0.5]} and list(chart.ticks) == ["1", "2", "3"]
    assert not list(acceptance_chart([{"strategy": "target", "accepted_by_position": None}]))
