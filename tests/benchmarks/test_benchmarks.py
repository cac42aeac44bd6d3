"""What `make bench` computes from its runs, and that every arm makes the text it is compared by."""

import sys
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from fakes import tiny_pair

sys.path.append(str(Path(__file__).parent))

from arms import Run, our_arms, peer_arms
from bench import ratios
from probes import acceptance


def test_every_arm_makes_the_greedy_text() -> None:
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


def test_decoding_is_told_apart_from_the_first_tokens() -> None:
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
    found = ratios(texts)
    assert set(found) == {"plain"}  # arms that were left out have no row
    assert {task: (cell["prompts"], cell["whole"]) for task, cell in found["plain"].items()} == {
        "large": (5, 2.0),
        "others": (2, 2.0),
        "all": (7, pytest.approx(2.0)),
    }
    assert found["plain"]["others"]["decode"] == pytest.approx(sqrt(0.5 * 8))
    assert found["plain"]["all"]["decode"] == pytest.approx((2.0**5 * 0.5 * 8) ** (1 / 7))


def test_acceptance_is_counted_by_task_and_place():
    pair = tiny_pair()
    rows = [("one", [5, 6, 7, 5]), ("two", [8, 9, 8, 9]), ("one", [1, 2, 3])]
    found = acceptance(pair, rows, 20)
    assert [*found] == ["greedy", "multinomial 1"] and [*found["greedy"]] == ["one", "two", "all"]
    for by_task in found.values():
        for place in range(4):
            assert [sum(by_task[task][place][part] for task in ("one", "two")) for part in (0, 1)] == by_task["all"][
                place
            ]
        good, tried = zip(*by_task["all"], strict=True)
        assert tried[0] > 0 and all(now == before for now, before in zip(tried[1:], good[:-1], strict=True))
