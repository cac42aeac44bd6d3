"""`make bench`: the ratios of a run, and whether they meet their bars."""

import math
import sys
from typing import Any

import pytest
from paths import BENCHMARKS

sys.path.append(str(BENCHMARKS))

import report
from arms import TARGET
from bars import Bar, bars, best, over, ratio

from utils.metrics.intervals import Interval, speedup_interval


def text(task: str, ours: list[float | None], theirs: list[float | None]) -> dict[str, Any]:
    cells = {TARGET: ours, "generate": theirs}
    return {"task": task, "arms": {name: {"decode": rates, "whole": [1.0]} for name, rates in cells.items()}}


def test_ratios_are_those_of_runs_of_one_repeat() -> None:
    texts = [
        text("one", [4.0, 6.0], [2.0, 2.0]),
        text("two", [1.0, None], [2.0, 2.0]),  # a repeat without a rate is left out
        text("two", [None], [1.0]),
        {"task": "two", "arms": {TARGET: {"decode": [9.0]}}},  # the peer did not run
    ]
    assert ratio(texts, TARGET, "generate") == speedup_interval([[2.0, 3.0], [0.5]])
    assert ratio(texts, TARGET, "generate", task="one") == speedup_interval([[2.0, 3.0]])
    assert ratio(texts, TARGET, "llama.cpp") is None
    assert report.ratios(texts)["plain"]["tasks"] == {"one": pytest.approx(math.sqrt(6)), "two": pytest.approx(0.5)}
    assert best(texts, ["generate", TARGET], "generate") == TARGET


@pytest.mark.parametrize(
    ("interval", "at_least", "verdict"),
    [
        (Interval(1.3, 1.25, 1.35), True, "met"),
        (Interval(1.3, 1.1, 1.5), True, "met, uncertain"),
        (Interval(1.1, 1.0, 1.19), True, "missed"),
        (Interval(1.1, 1.0, 1.3), True, "missed, uncertain"),
        (Interval(1.1), True, "missed"),
        (Interval(1.3, 1.25, 1.35), False, "missed"),
        (Interval(1.1, 1.0, 1.19), False, "met"),
        (None, False, "not measured"),
    ],
)
def test_verdicts_of_bars(interval: Interval | None, at_least: bool, verdict: str) -> None:
    assert Bar("name", 1.2, interval, at_least=at_least).verdict == verdict


def test_bars_compare_turns_and_know_what_was_not_measured() -> None:
    setting = {"formats": {"ours": "float32", "generate": "float32"}, "avx2_only": True, "weight_bytes": 500e6}
    turns = {TARGET: [{"first_seconds": 3.0, "step_seconds": 0.1}], "generate": [{"first_seconds": 2.0}]}
    turns["generate"][0]["step_seconds"] = 0.2
    found = bars(
        {
            "setting": setting,
            "verify_seconds": {"ours": {1: [1.0, 2.0], 5: [1.5, 2.6], 9: [2.0, 4.0]}},
            "step_over_products": {"step": [1.2, 2.4], "products": [1.0, 2.0]},
            "long_prompts": {500: turns, 6000: turns},
            "program": {"resident": 550e6},
        }
    )
    by_name = {bar.name: bar for bar in found}
    verify = by_name["verify cost v(5)"]
    assert verify.ratio == speedup_interval([[1.5, 1.3]]) and verify.bound == 1.45
    assert by_name["time to first token, 6000 tokens"].ratio == Interval(pytest.approx(1.5))
    products = by_name["decode step / its products"]
    assert products.ratio == speedup_interval([[1.2, 1.2]]) and products.verdict == "met"
    assert by_name["decode step at 6000 tokens"].verdict == "met"
    assert by_name["resident memory over 1.2 weights + 500 MB"].ratio == Interval(0.5)
    assert by_name["plain / generate"].verdict == "not measured"
    assert over([1.0, None], [2.0, 3.0]) == Interval(0.5)
