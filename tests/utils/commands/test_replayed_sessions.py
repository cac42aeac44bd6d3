"""/replay: recorded runs give the same results again, with every kind of settings and drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Screen, records_of
from recordings import recorded
from replays import replayed

from utils.commands.compare import SAME


@pytest.fixture(autouse=True)
def same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions may otherwise choose different numbers of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


SESSIONS = {
    "greedy": (
        "/drafter on",
        "/beams 3",
        "Hello\\nthere",
        "/gamma auto",
        "Once upon a time",
        "/chat off",
        "/gamma 2",
        "a b a b a b",
    ),
    "rules": (
        "/drafter on",
        "/processor multinomial 1",
        "Hello",
        "/verify coupled",
        "Hello",
        "/verify block",
        "/gamma auto",
        "Hello",
    ),
    "processors": (
        "/processor nucleus 0.8 0.9",
        "Hi",
        "/processor topk 1.5 20",
        "/seed 7",
        "Hi",
        "/processor topknucleus 0.7 40 0.9",
        "/cache",
        "Hi",
    ),
    "drafters": (
        "/processor multinomial 0.9",
        "/drafter_kind loaded suffix chain layers:1 lookup",
        "/gamma auto",
        "a b a b",
        "/gamma 3",
        "a b",
    ),
    "storages": (
        "/ngram kind onelevel 4",
        "/ngram candidates 1",
        "a a a",
        "/system Be brief.",
        "b",
        "/system none",
        "/special on",
        "<|im_end|>x",
    ),
}


@pytest.mark.parametrize("lines", SESSIONS.values(), ids=SESSIONS)
def test_a_replay_gives_the_same_results(lines: tuple[str, ...], view: Screen, tmp_path: Path) -> None:
    file = recorded(view, tmp_path, "/length 14", *lines, draft_seconds=lambda job: 0.001)
    rows, conclusion = replayed(view, file)
    runs = records_of(file)
    assert [row["lines"] for row in rows] == [[[number], [number]] for number in range(1, len(runs) + 1)]
    assert [row["strategy"] for row in rows] == [run["strategy"] for run in runs] and len(rows) >= 9
    assert all(row["same_text"] and row["first_difference"] is None for row in rows), view.take()[0]
    for row, run in zip(rows, runs, strict=True):
        assert row["accepted"] == [run["accepted"]] * 2 and row["drafted"] == [run["drafted"]] * 2
        (before,), (now,) = row["tokens_per_second"]
        assert row["ratios"] == [pytest.approx(now / before)] and before == run["tokens_per_second"]
    assert SAME in conclusion and conclusion.count("texts: ") == len({run["strategy"] for run in runs})
