"""Trials: what is installed, tested and measured, and how often, until an engine has been chosen."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from fake_engines import parking_row, row, started
from fixed_speeds import fix_speeds
from tiny import tiny_llama

from utils.engine import Engine
from utils.engine.engine_choice import TYPICAL

from utils.engine.engine_samples import speed_ratio, typical, with_samples
from utils.engine.engine_trials import MAX_TURNS, MIN_TURNS

TIMES = {"plain": 0.03, "parking": 0.010, "other": 0.0101}


def events(engine: Engine, name: str) -> list[str]:
    return engine._seat.engines[name].events  # type: ignore[attr-defined]


def turns(calls: list[tuple[str, int, int]]) -> list[str]:
    """The engines in the order in which the widest pass was measured."""
    order = [name for name, _, width in calls if width == 9]
    return [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]


def test_only_the_chosen_engine_is_tested_with_the_chosen_number_of_threads(
    rows: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(quick=row(), second=row(), slow=row())
    monkeypatch.setattr("utils.engine.threads.requested_threads", lambda: None)
    monkeypatch.setattr("utils.engine.threads.candidate_counts", lambda: [1, 2])
    engine, _ = started({"plain": 0.02, "quick": 0.01, "second": 0.0101, "slow": 0.1})
    state = engine.use("auto", 0)
    tests = {
        name: [event for event in events(engine, name) if "test " in event] for name in ("quick", "second", "slow")
    }
    assert state.kind == "quick" and tests == {"quick": [f"test {state.threads}"], "second": [], "slow": []}
    table = engine.selection.table
    assert (table["quick"].verified, table["second"].verified) == (True, False)


def test_all_candidates_are_tested_on_request(rows: Callable[..., None]) -> None:
    rows(quick=row(), second=row(), broken=row(test_fails="logits differ"))
    engine, _ = started({"plain": 0.02, "quick": 0.01, "second": 0.0101, "broken": 0.005})
    engine.test("auto", 1)
    table = engine.selection.table
    assert table["quick"].verified and table["second"].verified
    assert table["broken"].failed and "logits differ" in table["broken"].problem


@pytest.mark.parametrize("failure", ["logits differ", RuntimeError("no kernel for 3 rows"), MemoryError()], ids=repr)
def test_if_the_fastest_engine_fails_its_test_the_next_one_is_tested(failure: Any, rows: Callable[..., None]) -> None:
    rows(broken=row(test_fails=failure), quick=parking_row(), last=row())
    engine, _ = started({"plain": 0.04, "broken": 0.01, "quick": 0.012, "last": 0.014})
    state = engine.use("auto", 1)
    assert (state.kind, state.verified, engine._seat.name) == ("quick", True, "quick")
    assert engine.selection.table["broken"].failed and "test 1" not in events(engine, "last")
    assert events(engine, "broken")[-1] == "remove"
    assert engine._seat.engines["quick"].computes  # type: ignore[attr-defined]


def test_a_named_engine_that_fails_its_test_is_removed(rows: Callable[..., None]) -> None:
    rows(broken=row(test_fails="logits differ"))
    engine, _ = started({"plain": 0.04, "broken": 0.01})
    with pytest.raises(ValueError, match="logits differ"):
        engine.use("broken", 1)
    assert engine._seat.name == "plain" and events(engine, "broken")[-1] == "remove"


@pytest.mark.parametrize("chosen", ["parking", "other"])
def test_finalists_take_turns_without_another_installation(chosen: str, rows: Callable[..., None]) -> None:
    rows(other=row(), parking=parking_row())
    engine, speeds = started(TIMES | {chosen: 0.0099})
    assert engine.use("auto", 1).kind == chosen
    assert turns(speeds.calls)[:3] == ["plain", "parking", "other"], "the other engine can stay below a parked one"
    assert turns(speeds.calls).count("parking") > 3, "turns of one pass for each width"
    for name in ("parking", "other"):
        assert [event for event in events(engine, name) if event.startswith("install")] == ["install"]
    assert events(engine, "parking").count("end trials") >= 1
    parking: Any = engine._seat.engines["parking"]
    assert (parking.computes, parking.parked, parking.in_trials) == (chosen == "parking", False, False)
    if chosen == "parking":
        assert "remove" in events(engine, "other"), "nothing stays below the chosen engine"


def test_close_finalists_get_more_turns_than_others(rows: Callable[..., None]) -> None:
    counts = {}
    for factor in (1.001, 1.15):
        rows(other=row(), parking=parking_row())
        engine, speeds = started({"plain": 0.03, "parking": 0.010, "other": 0.010 * factor})
        engine.use("auto", 1)
        counts[factor] = sum(name == "parking" and width == 9 for name, _, width in speeds.calls) - 3
    assert counts == {1.001: MAX_TURNS, 1.15: MIN_TURNS}


def test_plain_layers_take_turns_with_a_parked_engine(rows: Callable[..., None]) -> None:
    rows(parking=parking_row())
    engine, _ = started({"plain": 0.010, "parking": 0.0105})
    assert engine.use("auto", 1).kind == "parking", "its bits are equal"
    assert events(engine, "parking").count("install") == 1
    assert "install tested" not in events(engine, "parking")


def test_interrupted_trials_release_everything(rows: Callable[..., None]) -> None:
    rows(other=row(), parking=parking_row())
    engine = Engine([tiny_llama(vocab_size=96)])

    def speed(name: str, threads: int, width: int) -> float:
        if name == "parking" and "resume" in events(engine, "parking"):
            raise KeyboardInterrupt
        return TIMES[name]

    fix_speeds(engine, speed)
    with pytest.raises(KeyboardInterrupt):
        engine.use("auto", 1)
    parking: Any = engine._seat.engines["parking"]
    assert (engine._seat.name, parking.computes, parking.parked, parking.in_trials) == ("plain", False, False, False)
    assert events(engine, "other")[-1] == "remove"


def test_the_lower_quartile_is_typical() -> None:
    assert typical([5.0]) == 5.0 and typical([3.0, 1.0, 2.0]) == 1.0
    assert typical([8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0]) == 2.0


def test_figures_of_samples() -> None:
    figures = with_samples(EngineFigures(prefill=500.0), {1: [0.5, 0.25], 2: [0.125], 5: [0.75, 0.5]})
    assert figures.step_seconds == 0.25 and figures.costs == ((2, 1.0), (5, 2.0)), "no pass is cheaper than a step"
    twice = {1: [0.05], 5: [0.075]}
    ratio = speed_ratio({"a": EngineFigures(), "b": EngineFigures()}, {"a": {1: [0.1], 5: [0.15]}, "b": twice}, TYPICAL)
    assert ratio == pytest.approx(2.0)


def test_a_machine_that_is_busy_most_of_the_time_does_not_decide(rows: Callable[..., None]) -> None:
    """Half of all passes take up to twice as long. The engines are 6 % apart."""
    right = 0
    for seed in range(20):
        rows(other=row(), parking=parking_row())
        engine, random = Engine([tiny_llama(vocab_size=96)]), Random(seed)
        times = {"plain": 0.03, "parking": 0.010, "other": 0.0106}

        def speed(name: str, threads: int, width: int, random: Random = random, times: Any = times) -> float:
            return times[name] * (1 + 0.1 * (width - 1)) * (1 + random.random() * (random.random() < 0.5))

        fix_speeds(engine, speed)
        right += engine.use("auto", 1).kind == "parking"
    assert right >= 18 and torch.get_num_threads() == 1
