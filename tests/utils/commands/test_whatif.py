"""/whatif on the screen and in the records: a table and sentences, and what it requires."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of, reported, table_pair

from utils.commands.experiments.speed_model import TargetTiming
from utils.commands.whatif import ESTIMATE, EXACT, _conclusion
from utils.decode.steps import FinishReason, Step
from utils.metrics.costs import Costs
from utils.metrics.results import Generation
from utils.repl.repl_session import Verdict


def test_every_gamma_is_shown_and_recorded(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    session = open_session(view, records=file)
    for line in (
        "/length 12",
        "/gamma 3",
        "/drafter_kind loaded chain",
        "Hello there",
        "/drafter_kind loaded chain suffix",
        "/whatif",
    ):
        assert session.handle(line) is Verdict.DONE, view.take()
    shown = view.take()[0]
    runs, report = records_of(file)[:-1], records_of(file)[-1]
    rows = {(row["drafter"], row["gamma"]): row for row in report["findings"]}
    assert set(rows) == {
        (name, gamma) for name in ("model", "chain", "suffix", "ngram") for gamma in (*range(17), None)
    }
    for run in runs:
        if run["strategy"] != "target":
            row = rows[run["drafter_kind"], 3]
            names = ("rounds", "drafted", "accepted", "tokens_per_target_forward")
            assert [row[name] for name in names] == [run[name] for name in names]
    assert EXACT in shown
    assert {row["strategy"] for row in rows.values()} == {
        "speculative model",
        "speculative chain",
        "speculative suffix",
        "ngram",
    }
    assert all(row["exact"] and row["speedup"] > 0 for row in rows.values())
    assert rows["model", 0]["speedup"] == pytest.approx(1)


def test_a_gamma_that_accepts_no_more_has_a_record_and_no_line(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = reported(monkeypatch)
    session = open_session(view, records=tmp_path / "records.jsonl")
    for line in ("/length 12", "/gamma 3", "Hello there"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    assert session.handle("/whatif") is Verdict.DONE
    ((report, rows),) = shown
    assert len(rows) == 2 * 18
    visible = report.shown(rows)
    for above, row in pairwise(rows):
        ours, theirs = ([one[name] for name in ("strategy", "rounds", "accepted")] for one in (row, above))
        assert (row in visible) == (row["gamma"] is None or ours != theirs)
    lines = view.take()[0].splitlines()
    listed = [line for line in lines if line.startswith(("speculative  ", "ngram  "))]
    assert len(listed) == len(visible) < 2 * 18


def predicted(name: str, *speedups: float, auto: float = 0.9) -> list[dict[str, Any]]:
    found = [*enumerate(speedups), (None, auto)]
    rows = [{"gamma": gamma, "speedup": speedup, "rounds": 9 - number} for number, (gamma, speedup) in enumerate(found)]
    return [row | {"strategy": name, "exact": True, "accepted": 1} for row in rows]


def concluded(gamma: int, *strategies: list[dict[str, Any]]) -> list[str]:
    return _conclusion(gamma, [row for rows in strategies for row in rows])


def test_the_conclusion_names_a_gamma_only_if_it_is_predicted_to_be_faster() -> None:
    slow, fast = predicted("a", 1.0, 1.01, 0.9), predicted("b", 1.0, 1.3, 1.52, auto=1.4)
    sentence, meaning = concluded(2, slow)
    assert "no gamma" in sentence and meaning.startswith(EXACT)
    first, second, _, following = concluded(3, slow, fast)
    assert "no gamma" in first and "gamma 2" in second and "1.52x" in second and "1.40x" in second
    assert "/gamma 2" in following and "/race 5" in following
    assert "/gamma" not in concluded(2, fast)[-1], "it is set already"
    adaptive = concluded(3, predicted("b", 1.0, 1.5, auto=1.49))
    assert "gamma auto" in adaptive[0] and "/gamma auto" in adaptive[-1], "auto is as good as the best"
    assert "(1: 1.50x)" in adaptive[0], "the table shows a larger figure, so the sentence names it"
    equal = predicted("b", 1.0, 1.5, 1.6)
    equal[2] |= {name: equal[1][name] for name in ("rounds", "accepted")}
    assert "gamma 1," in concluded(3, equal)[0], "gamma 2 is not listed, because it changes no round"


def test_under_rules_with_their_own_noise_it_is_an_estimate(view: Screen, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    session = open_session(view, records=file)
    for line in ("/processor multinomial 1", "/length 12", "Hello", "/whatif"):
        session.handle(line)
    assert ESTIMATE in view.take()[0]
    assert {row["drafter"]: row["exact"] for row in records_of(file)[-1]["findings"]} == {"chain": False, "ngram": True}
    session.handle("/verify coupled")
    session.handle("Hello")
    session.handle("/whatif")
    assert ESTIMATE not in view.take()[0]


def test_missing_runs_are_named(view: Screen) -> None:
    session = open_session(view)
    assert session.handle("/whatif") is Verdict.FAILED and "prompt" in view.take()[1]
    for line in ("/target off", "/length 8", "Hello"):
        session.handle(line)
    assert session.handle("/whatif") is Verdict.FAILED and "/target on" in view.take()[1]
    for line in ("/target on", "/length 1", "Hello"):
        session.handle(line)
    assert session.handle("/whatif") is Verdict.FAILED and "two tokens" in view.take()[1]
    assert session.handle("/whatif now") is Verdict.FAILED and "now" in view.take()[1]


def test_without_a_drafter_only_the_storage_drafts(view: Screen, tmp_path: Path) -> None:
    session = open_session(view, table_pair(drafter=False), tmp_path / "records.jsonl")
    for line in ("/length 8", "Hello", "/whatif"):
        assert session.handle(line) is Verdict.DONE
    assert {row["drafter"] for row in records_of(tmp_path / "records.jsonl")[-1]["findings"]} == {"ngram"}


def test_times_are_decode_steps_plus_costs() -> None:
    run = Generation(tuple(Step((), 0, token) for token in range(5)), 3.0, 1.0, FinishReason.LENGTH)
    timing = TargetTiming.of(run)
    assert (timing.start, timing.step) == (0.5, 0.5)
    rounds = [Step((1, 2), 1, 3), Step((), 0, 4), Step((5,), 1, 6)]
    steps = 3 + (0.3 + 0.1) + 3 * 0.25  # decode steps, verify costs, draft costs
    assert timing.predict(rounds, Costs((0.1, 0.3)), 3 * 0.25) == pytest.approx(0.5 + 0.5 * steps)
