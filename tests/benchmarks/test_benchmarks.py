"""`make bench`: every arm generates the same text, and rates, ratios and acceptance are computed correctly."""

import sys
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from fakes import tiny_pair

sys.path.append(str(Path(__file__).parent))

from arms import Run, our_arms, peer_arms
from probes import acceptance
from report import ratios


def test_every_arm_generates_the_greedy_text() -> None:
    ours, theirs = tiny_pair(), tiny_pair()
    ours.engine.use("auto", 1)
    texts = {}
    for arm in [*our_arms(ours, [2], ["suffix", "layers:1"]), *peer_arms(theirs)]:
        run = arm.run([5, 6, 7, 5, 6, 7, 5, 6], 40)
        assert 1 <= run.first <= len(run.tokens) <= 40
        assert 0 < run.first_seconds <= run.seconds
        texts[arm.name] = run.tokens
    assert len(texts) == 9
    assert len({tuple(tokens) for tokens in texts.values()}) == 1, texts


def test_the_decode_rate_leaves_out_the_first_tokens() -> None:
    run = Run(list(range(11)), seconds=3.0, first=1, first_seconds=1.0)
    assert (run.decode_rate, run.rate) == (5.0, pytest.approx(11 / 3))
    assert Run([1, 2, 3], 1.0, 1, 0.5).decode_rate is None


def text(task: str, ours: float | None, theirs: float) -> dict[str, Any]:
    cells = {"ours target": {"decode": ours, "whole": 2.0}, "generate": {"decode": theirs, "whole": 1.0}}
    return {"task": task, "arms": cells}


def test_ratios_are_geometric_means_and_small_tasks_are_pooled() -> None:
    texts = [
        *(text("large", 4.0, 2.0) for _ in range(5)),
        text("small", 1.0, 2.0),
        text("tiny", 8.0, 1.0),
        text("tiny", None, 1.0),
    ]
    result = ratios(texts)
    assert set(result) == {"plain"}  # pairs of arms that did not run are left out
    assert {task: (cell["prompts"], cell["whole"]) for task, cell in result["plain"].items()} == {
        "large": (5, 2.0),
        "others": (2, 2.0),
        "all": (7, pytest.approx(2.0)),
    }
    assert result["plain"]["others"]["decode"] == pytest.approx(sqrt(0.5 * 8))
    assert result["plain"]["all"]["decode"] == pytest.approx((2.0**5 * 0.5 * 8) ** (1 / 7))


def test_acceptance_is_counted_by_task_and_position() -> None:
    rows = [("one", [5, 6, 7, 5]), ("two", [8, 9, 8, 9]), ("one", [1, 2, 3])]
    by_processor = acceptance(tiny_pair(), rows, 20)
    assert set(by_processor) == {"greedy", "multinomial 1"}
    for by_task in by_processor.values():
        assert list(by_task)[-1] == "all" and set(by_task) == {"one", "two", "all"}
        for one, two, total in zip(by_task["one"], by_task["two"], by_task["all"], strict=True):
            assert [one[0] + two[0], one[1] + two[1]] == total
        accepted, counted = zip(*by_task["all"], strict=True)
        assert counted[0] > 0 and counted[1:] == accepted[:-1]  # a draft counts if the one before it was accepted
