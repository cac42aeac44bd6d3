"""What reports say about speed: no winner without evidence, and none among runs that cannot be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulations import FEWER

from utils.commands.experiments.races import best_of_each, race_conclusion
from utils.commands.race import conclusion as sweep_conclusion
from utils.comparison.speed_claims import agree, speed_claim, speed_sentence
from utils.metrics import intervals

CLEAR = [1.5, 1.52, 1.48, 1.51, 1.49]
CLAIMS = ("is faster", "is the fastest", "is slower", "faster over")


@pytest.mark.parametrize(
    ("groups", "tokens_per_forward", "expected"),
    [
        ([], 2.0, "-"),
        ([[1.29]], 2.0, "too few"),
        ([[1.3, 1.31], [1.3, 1.31]], 2.0, "too few"),
        ([CLEAR], 2.0, "faster"),
        ([CLEAR], None, "faster"),
        ([CLEAR], 1.0, "not distinguishable"),
        ([CLEAR], 1.004, "not distinguishable"),
        ([CLEAR], 1.01, "faster"),
        ([[0.5, 0.51, 0.49, 0.5, 0.52]], 1.0, "slower"),
        ([[1.01, 1.02, 1.3, 1.01, 4.0]], 2.0, "not distinguishable"),  # all agree, but the interval holds 1
        ([[1.5, 1.52, 1.48, 1.51, 0.999]], 2.0, "not distinguishable"),  # one does not agree
        ([[1.5], [1.4], [1.6], [1.5], [0.999]], 2.0, "faster"),  # prompts may differ
    ],
)
def test_a_verdict_needs_an_interval_and_repeats_that_agree(
    groups: list[list[float]], tokens_per_forward: float | None, expected: str
) -> None:
    assert speed_claim(groups, tokens_per_forward=tokens_per_forward)["verdict"] == expected


def test_the_baseline_is_named_and_an_unbounded_interval_is_not_recorded() -> None:
    assert speed_claim([[1.0] * 9], baseline=True)["verdict"] == "baseline"
    assert speed_claim([[1.29]])["interval"] is None


def test_repeats_agree_if_chance_does_it_once_in_16() -> None:
    assert agree([1.1] * 5) and agree([0.9] * 5) and not agree([1.1] * 4)
    assert not agree([1.1] * 7 + [0.9]) and agree([1.1] * 8 + [0.9])
    assert not agree([1.1] * 4 + [1.0])


@pytest.mark.parametrize("repeats", [5, 20, pytest.param(8, marks=pytest.mark.full)])
def test_equal_speeds_are_seldom_called_different(repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of five that agree alone would be wrong in 1 of 16."""
    monkeypatch.setattr(intervals, "RESAMPLES", FEWER)
    random = np.random.default_rng(repeats)
    draws = np.exp(random.normal(0, 0.1, (1000, repeats)))
    wrong = sum(speed_claim([list(map(float, draw))])["verdict"] != "not distinguishable" for draw in draws)
    assert wrong <= 62


def row(strategy: str, speedups: list[float], forwards: float | None = 2.0, **figures: Any) -> dict[str, Any]:
    claim = speed_claim(
        [speedups], baseline=strategy == "target", tokens_per_forward=None if strategy == "target" else forwards
    )
    return {
        "strategy": strategy,
        "task": "all",
        "lossless": True,
        "prompts": len(speedups),
        "speedups": speedups,
        "tokens_per_second": [10 * value for value in speedups],
        "text_number": 0,
        "setting": "gamma 1",
        **claim,
        **figures,
    }


def claimed(lines: list[str]) -> bool:
    return any(claim in line for line in lines for claim in CLAIMS)


def test_a_race_claims_nothing_without_evidence() -> None:
    target = row("target", [1.0] * 5)
    assert claimed(race_conclusion([row("speculative", CLEAR), target]))
    assert "1.50x" in race_conclusion([row("speculative", CLEAR), target])[0]
    few = race_conclusion([row("speculative", [1.7]), target])
    assert not claimed(few) and "1.7x" in few[0] and "/race 5" in few[-1]
    noise = race_conclusion([row("ngram", [1.29], 1.0), target])
    assert not claimed(noise) and "noise" in noise[0]
    assert "noise" not in race_conclusion([row("ngram", [0.7], 1.0), target])[0], "drafts that gain nothing take time"
    assert not claimed(race_conclusion([row("ngram", CLEAR, 1.0), target]))
    assert "/why" in race_conclusion([row("ngram", [0.8, 1.2, 1.0, 1.1, 0.9]), target])[-1]
    assert speed_sentence(target) == ""
    assert "/target on" in race_conclusion([row("ngram", [])])[0]


def test_a_task_claims_nothing_without_evidence() -> None:
    target = row("target", [1.0] * 5)
    (sentence,) = best_of_each({"maths": [row("a", CLEAR), row("b", [1.2]), target]})
    assert sentence.startswith("maths: a is faster: 1.50x")
    fast = row("drafter", [9.0] * 5, lossless=False)
    for rows in (
        [row("a", [1.29]), target],
        [row("a", CLEAR, 1.0), target],
        [row("a", [0.8, 1.3, 1.2, 0.9, 1.1]), target],
        [fast, target],
        [row("a", [])],
    ):
        assert not claimed(best_of_each({"maths": rows}))
    assert "is slower: 0.80x" in best_of_each({"maths": [row("a", [0.8, 0.81, 0.8, 0.79, 0.8]), target]})[0]
    few = best_of_each({"maths": [row("a", [1.29])], "code": [row("a", [0.7, 0.7], 1.0)]})
    assert few == ["Too few runs to tell: maths, a about 1.3x; code, a 0.70x (0.70 to 0.70)."]


def swept(setting: str, speeds: list[float], strategy: str = "a", **figures: Any) -> dict[str, Any]:
    return row(strategy, [speed / 10 for speed in speeds], setting=setting, tokens_per_second=speeds, **figures)


def test_a_sweep_names_the_fastest_value_only_if_it_is_told_from_the_others() -> None:
    first, second = swept("gamma 1", [12, 12.1, 11.9, 12, 12.2]), swept("gamma 2", [15, 15.1, 14.9, 15, 15.2])
    target = swept("gamma 1", [10.0] * 5, "target")
    lines = sweep_conclusion([first, second, target])
    assert claimed(lines) and "a with gamma 2" in lines[0] and "/gamma 2" in lines[-1]
    assert "/race 5" in lines[-1], "the best of several values looks better than it is"
    assert "/race 5" not in sweep_conclusion([second, target])[-1]
    parts = [swept("order 2", [12, 12.1, 11.9, 12, 12.2]), swept("order 4", [15, 15.1, 14.9, 15, 15.2]), target]
    assert "/ngram order 4 " in sweep_conclusion(parts)[-1]
    near = swept("gamma 3", [15.1, 14.9, 15, 15.2, 15.0])
    lines = sweep_conclusion([first, second, near, target])
    assert not claimed(lines) and "gamma 3" in lines[0] and "gamma 1" not in lines[0]
    assert not claimed(sweep_conclusion([swept("gamma 1", [15.0]), swept("gamma 2", [12.0])]))
    slow = [swept("gamma 1", [8.0, 8.1, 8, 8, 8]), swept("gamma 2", [5.0] * 5), target]
    assert not claimed(sweep_conclusion(slow)), "the fastest value is slower than target-only"
    assert not claimed(sweep_conclusion([swept("gamma 0", [13.0] * 5, without_gain=True), target]))


def test_the_same_setting_twice_has_no_fastest_value() -> None:
    """The baseline itself was announced as the fastest: target with gamma 1."""
    speeds = [11.5, 12, 11, 13, 11.7]
    rows = [swept("gamma 1", speeds), swept("gamma 1", speeds[::-1]), swept("gamma 1", [30.0] * 5, "target")]
    assert not claimed(sweep_conclusion(rows)) and not any("target with" in line for line in sweep_conclusion(rows))


def test_a_sweep_does_not_compare_different_texts() -> None:
    rows = [
        swept("temperature 0", [30.0] * 5, text_number=0),
        swept("temperature 0", [10.0] * 5, "target", text_number=0),
        swept("temperature 1", [11.0, 12, 10, 9, 11], text_number=1),
        swept("temperature 1", [10.0] * 5, "target", text_number=1),
    ]
    lines = sweep_conclusion(rows)
    assert not any("fastest" in line for line in lines)
    assert "temperature 0: a is faster" in lines[1] and "not distinguishable" in lines[2]
    noise = swept("temperature 1", [50.0] * 5, "b", text_number=1, without_gain=True)
    assert sweep_conclusion([*rows, noise])[2] == lines[2], "a speed-up that drafts cannot have caused is not the best"


def test_an_interval_that_excludes_1_is_not_contradicted_without_a_reason() -> None:
    row = {"strategy": "ngram", **speed_claim([[0.5, 0.5, 0.6, 0.6, 1.01]])}
    assert row["interval"][1] < 1 and row["verdict"] == "not distinguishable"
    assert "repeats" in speed_sentence(row)
    assert "repeats" not in speed_sentence({**row, "interval": [0.5, 1.1]})
