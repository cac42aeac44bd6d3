"""/replay: recorded runs give the same results again, with every kind of settings and drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Screen, records_of
from recordings import recorded
from replays import replayed

from utils.commands import replay


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
    assert [row["line"] for row in rows] == list(range(1, len(runs) + 1)) and len(rows) >= 9
    assert [row["strategy"] for row in rows] == [run["strategy"] for run in runs]
    assert all(row["first_difference"] is None and row["same_acceptance"] is not False for row in rows), view.take()[0]
    for row, run in zip(rows, runs, strict=True):
        assert row["accepted"] == [run["accepted"]] * 2 and row["drafted"] == [run["drafted"]] * 2
        assert row["prompt_tokens"] == [run["prompt_tokens"]] * 2 and row["differences"] == []
        if run["tokens_per_target_forward"] is not None:
            assert row["tokens_per_target_forward"] == [run["tokens_per_target_forward"]] * 2
        assert row["ratio"] == pytest.approx(row["tokens_per_second"][1] / run["tokens_per_second"])
    drafting = sum(run["drafted"] is not None for run in runs)
    assert f"{len(rows)} of {len(rows)} texts" in conclusion and f"{drafting} of {drafting}." in conclusion
    assert replay.UNCHANGED in conclusion
