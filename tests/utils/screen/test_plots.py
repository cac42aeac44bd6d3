"""Charts as text and as pictures: the measured values at their places, nothing dropped silently, any text shown."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from utils.comparison.charts import (
    BarChart,
    Chart,
    DotChart,
    DotRow,
    LineChart,
    Marker,
    StackedChart,
    acceptance_chart,
    caption,
    prompt_charts,
    repeats_chart,
    time_chart,
)
from utils.screen.figures import chart_figure, png_plot, svg_plot
from utils.screen.plots import HEIGHT, SIGNS, text_plot

DOTS = DotChart(
    "speeds", "speed-up", [DotRow("one", [1.0, 1.5, 2.0], (1.2, 1.9)), DotRow("two", [1.1]), DotRow("none", [])], 1.0
)
LINES = LineChart(
    "curves", "gamma", list("0123"), {"a": [1, 2, 3, 2], "b": [2, None, 1]}, [Marker("auto", "a", 1.5, 2.5)], 1.0
)
BARS = BarChart("rates", "position", list("123"), {"a": [1.0, 0.5, 0.0], "b": [0.25, None, None]})
STACK = StackedChart("time", "seconds", ["a", "b"], {"draft": [1.0, 0.0], "verify": [1.0, 4.0]})
CHARTS = (DOTS, LINES, BARS, STACK)


def many(count: int) -> list[Chart]:
    """Charts with this many rows or series."""
    names = [f"series number {index} with a long name" for index in range(count)]
    return [
        DotChart("dots", "x", [DotRow(name, [1.0, 2.0]) for name in names]),
        LineChart("lines", "x", list("01"), {name: [1.0, 2.0] for name in names}),
        BarChart("bars", "x", [str(index) for index in range(count)], {name: [0.5] * count for name in names}),
        StackedChart("stack", "x", names, {"part": [1.0] * count}),
    ]


@pytest.mark.parametrize("width", [10, 40, 80, 400])
@pytest.mark.parametrize("chart", [*CHARTS, *many(9), *many(60)])
def test_a_plot_in_a_terminal_is_small(chart: Chart, width: int) -> None:
    lines = text_plot(chart, width=width, caption="pair, machine and prompt " * 9).splitlines()
    assert len(lines) <= HEIGHT == 10 and max(map(len, lines)) <= min(max(width, 40), 100)
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


def test_a_bar_of_height_0_differs_from_a_missing_one() -> None:
    bottom = text_plot(BARS, width=60).splitlines()[-3]
    assert bottom.partition("|")[2].split() == ["***ooo", "***", "___"]


def test_stacked_bars_are_as_long_as_their_parts() -> None:
    _, first, second, legend = text_plot(STACK, width=60).splitlines()
    assert abs(first.count("#") - first.count("=")) <= 1 and "#" not in second
    assert second.count("=") == pytest.approx(2 * (first.count("#") + first.count("=")), abs=1)
    assert first.endswith("2.00") and second.endswith("4.00") and "# draft" in legend


def test_dots_in_a_picture_are_the_measured_values() -> None:
    axes = chart_figure([DOTS]).axes[0]
    assert [list(dots.get_offsets()[:, 0]) for dots in axes.collections if dots.get_offsets().shape[0] > 1] == [
        [1.0, 1.5, 2.0]
    ]
    (bar, reference) = axes.get_lines()
    assert list(bar.get_xdata()) == [1.5] and list(reference.get_xdata()) == [1.0, 1.0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["one", "two", "none"]


def test_curves_in_a_picture_have_gaps_and_markers() -> None:
    axes = chart_figure([LINES]).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["a"].get_ydata()) == [1, 2, 3, 2] and lines["b"].get_ydata()[1] != lines["b"].get_ydata()[1]
    assert list(lines["a, auto"].get_xdata()) == [1.5] and list(lines["target-only"].get_ydata()) == [1.0, 1.0]
    assert axes.get_ylim()[0] == 0


def test_bars_in_a_picture_have_their_heights() -> None:
    axes, stack = chart_figure([BARS, STACK]).axes
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.5, 0.0, 0.25]
    assert [(bar.get_x(), bar.get_width()) for bar in stack.patches] == [(0, 1), (0, 0), (1, 1), (0, 4)]


@pytest.mark.parametrize("text", ["$x^2$ \\frac{", "<script>&amp;", "\x1b[31m\x00", "日本語 🙂", "a\nb", "x" * 999])
def test_any_text_can_be_drawn(text: str) -> None:
    chart = LineChart(text, text, [text], {text: [1.0]}, [Marker(text, text, 0, 1)])
    dots = DotChart(text, text, [DotRow(text, [1.0])])
    assert png_plot([chart, dots], text).startswith(b"\x89PNG")
    svg = svg_plot([chart, dots], text)
    words = "".join(ElementTree.fromstring(svg).itertext())
    assert "<script" not in svg and "\x1b" not in svg and "$x^2$" in words + "$x^2$" * ("$" not in text)


def test_the_same_chart_is_the_same_picture() -> None:
    assert svg_plot(CHARTS, "caption") == svg_plot(CHARTS, "caption") and "caption" in svg_plot(CHARTS, "caption")


def figures(strategy: str, speedups: list[float], **changes: object) -> dict[str, object]:
    speeds = [10.0 * value for value in speedups]
    row = {"strategy": strategy, "speedups": speedups, "tokens_per_second": speeds, "interval": [1.3, 1.8]}
    return row | {"speedup": 1.52, "without_gain": False} | changes


def test_repeats_become_speed_ups_with_an_interval() -> None:
    target, fast, twice = figures("target", [1.0] * 5), figures("ngram", [1.4, 1.5, 1.6]), figures("x", [2.0, 2.1])
    chart = repeats_chart([(str(row["strategy"]), row) for row in (fast, target, twice)])
    assert [row.label for row in chart.rows] == ["ngram", "x"] and chart.reference == 1.0
    assert list(chart.rows[0].values) == [1.4, 1.5, 1.6] and chart.rows[1].interval is None
    assert chart.rows[0].interval == (1.3, 1.8) and text_plot(chart, width=80).splitlines()[1].endswith("1.52x")
    alone = repeats_chart([("drafter", figures("drafter", [], tokens_per_second=[5.0, 6.0]))])
    assert alone.reference is None and list(alone.rows[0].values) == [5.0, 6.0]


def test_several_prompts_are_a_dot_each() -> None:
    row = figures("x", [1.0, 4.0, 3.0], speedups_by_prompt=[[1.0, 4.0], [3.0]])
    assert repeats_chart([("x", row)], "prompt").rows[0].values == pytest.approx([2.0, 3.0])


def record(strategy: str, **changes: object) -> dict[str, object]:
    drafts = {"accepted_by_position": [[3, 4], [1, 3], [0, 0]], "draft_seconds": 0.5, "verify_seconds": 1.0}
    return {"strategy": strategy, "seconds": 2.0, **drafts, **changes}


def test_the_runs_of_a_prompt_as_charts() -> None:
    nothing = {"accepted_by_position": None, "draft_seconds": None, "verify_seconds": None}
    rates, time = prompt_charts([record("speculative"), record("target", **nothing)])
    assert isinstance(rates, BarChart) and rates.series == {"speculative": [0.75, 1 / 3, None]}
    assert rates.counts["speculative"] == ["3/4", "1/3", "0/0"] and "1/3" in svg_plot([rates])
    assert isinstance(time, StackedChart) and time.labels == ["speculative", "target"]
    assert time.parts == {"draft": [0.5, 0], "verify": [1, 0], "other": [0.5, 0], "not split": [0, 2]}
    assert not prompt_charts([record("target", **nothing)]) and not list(acceptance_chart({"a": []}))
    assert not list(time_chart({}))


def test_a_caption_names_pair_machine_and_prompt() -> None:
    row = {
        "prompt": "Hello\nthere",
        "models": {"target": "big", "drafter": "small", "device": "cpu"},
        "engine": {"threads": 2},
        "machine": {"cpu": "Fast CPU", "gpus": []},
    }
    assert caption(row) == "big + small · Fast CPU, 2 threads · Hello there"
    on_gpu = row | {"models": {"target": "big", "drafter": None, "device": "cuda:0"}, "machine": {"gpus": ["H100"]}}
    assert caption(on_gpu) == "big + no drafter · H100 · Hello there"
    assert "None" in caption({"prompt": ""}) or caption({"prompt": ""})
