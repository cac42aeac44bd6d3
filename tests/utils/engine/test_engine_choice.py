"""The choice among engines: by measured speed, with equal bits preferred within ten percent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_engines import events, row, started, whole_llama
from fixed_speeds import fix_speeds

from utils.engine import Engine, machine
from utils.engine.engine_choice import (
    NO_PROMISE,
    EngineFigures,
    Workload,
    choose,
    expected_speed,
    faster_baseline,
    lower_quartile,
)
from utils.engine.layer_engine import BIT_IDENTICAL

MEASURED = EngineFigures(
    step_seconds=0.05, costs=((2, 1.1), (5, 1.2), (9, 1.5)), prefill=500.0, threads=1, promise=BIT_IDENTICAL
)
EXACT, OTHER = replace(MEASURED, verified=True), replace(MEASURED, promise="")


def test_the_expected_speed_is_that_of_whole_runs() -> None:
    # 256 / 500 s of reading; 128 tokens at 20 a second, or at (1 - 0.6^5) / 0.4 / (0.05 * 1.2) = 38.42 a second
    alone, drafted = 128 / (0.512 + 6.4), 128 / (0.512 + 128 / 38.4266667)
    assert expected_speed(MEASURED, Workload(1, 0)) == pytest.approx(alone)
    assert expected_speed(MEASURED, Workload(0, 1)) == pytest.approx(drafted)
    assert expected_speed(MEASURED) == pytest.approx((alone * drafted**2) ** (1 / 3))


@pytest.mark.parametrize("change", [{"step_seconds": 0.06}, {"costs": ((5, 1.4),)}, {"prefill": 100.0}])
def test_every_figure_counts(change: Any) -> None:
    assert expected_speed(replace(MEASURED, **change)) < expected_speed(MEASURED)


@pytest.mark.parametrize(("factor", "chosen"), [(1.02, "exact"), (1.09, "exact"), (1.12, "other"), (2.0, "other")])
def test_equal_bits_are_given_up_for_more_than_ten_percent_only(factor: float, chosen: str) -> None:
    faster = replace(OTHER, step_seconds=0.05 / factor, prefill=500.0 * factor)
    choice = choose({"other": faster, "exact": EXACT})
    assert choice.name == chosen and bool(choice.reason) is (chosen == "other")
    assert chosen == "exact" or f"{factor - 1:.0%} faster than exact" in choice.reason


def test_of_equal_figures_the_first_row_with_equal_bits_is_chosen() -> None:
    assert choose({"other": OTHER, "first": EXACT, "second": EXACT}).name == "first"
    assert choose({"first": OTHER, "second": OTHER}).name == "first"


def test_the_lower_quartile_is_typical() -> None:
    assert lower_quartile([5.0]) == 5.0 and lower_quartile([3.0, 1.0, 2.0]) == 1.0
    assert lower_quartile([8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0]) == 2.0


def test_a_promise_counts_until_its_test_fails() -> None:
    faster, promised = replace(OTHER, step_seconds=0.049), replace(EXACT, verified=False)
    assert choose({"other": faster, "promised": promised}).name == "promised"
    assert choose({"other": faster, "promised": replace(promised, problem="logits differ")}).name == "other"


def test_problems_are_the_reason_if_nothing_has_equal_bits() -> None:
    problem = replace(EXACT, problem="it lacks memory")
    assert choose({"plain": OTHER, "exact": problem}).reason == "it lacks memory"
    both = {"plain": OTHER, "exact": problem, "second": replace(problem, problem="no CPU")}
    assert choose(both).reason == "exact: it lacks memory; second: no CPU"
    assert choose({"exact": problem}).name == ""


def test_problems_count_only_for_engines_that_promise_equal_bits() -> None:
    exact, other = replace(EXACT, problem="it lacks memory"), replace(OTHER, problem="no CUDA device")
    assert choose({"plain": OTHER, "other": other}).reason == NO_PROMISE
    assert choose({"plain": OTHER, "second": OTHER, "other": other}).reason == NO_PROMISE
    assert choose({"plain": OTHER, "second": OTHER, "other": other, "exact": exact}).reason == "it lacks memory"


def test_a_faster_baseline_is_another_engine_with_a_clearly_shorter_step() -> None:
    table = {"plain": replace(OTHER, step_seconds=0.04), "exact": EXACT, "failed": EngineFigures("no memory")}
    found = faster_baseline(table, "exact")
    assert found is not None and (found.name, found.factor) == ("plain", pytest.approx(1.25))
    assert faster_baseline(table, "plain") is None and faster_baseline({}, "plain") is None
    assert faster_baseline(table | {"plain": replace(OTHER, step_seconds=0.049)}, "exact") is None


def test_all_candidates_are_measured_and_the_fastest_is_installed(rows: Callable[..., None]) -> None:
    rows(slow=row(), quick=row(), unsuited=row(unsupported=lambda self: "no CPU"))
    engine, speeds = started({"plain": 0.02, "slow": 0.019, "quick": 0.01})
    state, table = engine.use("auto", 0), engine.table
    assert (state.kind, state.verified, engine._engine.is_whole) == ("quick", True, True)
    assert [*table] == ["plain", "slow", "quick", "unsuited"]
    assert table["unsuited"].problem == "no CPU"
    assert dict(table["quick"].costs) == pytest.approx({2: 1.1, 5: 1.4, 9: 1.8})
    assert table["quick"].step_seconds == pytest.approx(0.01)
    assert table["quick"].nbytes == 1000 + table["plain"].nbytes > 1000  # totals, as of the engine in use
    assert table["quick"].estimated and table["quick"].prefill == pytest.approx(1e6)
    assert {threads for name, threads, _ in speeds.calls if name == "quick"} == {*machine.candidate_threads()}


def test_only_the_winner_is_installed_and_tested_for_whole_models(
    rows: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(quick=row(), second=row(), slow=row())
    monkeypatch.setattr("utils.engine.machine.requested_threads", lambda: 0)
    monkeypatch.setattr("utils.engine.machine.candidate_threads", lambda: [1, 2])
    engine = Engine([whole_llama()])
    times = {"plain": {1: 0.02, 2: 0.03}, "quick": {1: 0.016, 2: 0.01}, "second": {1: 0.012, 2: 0.013}}
    speeds = fix_speeds(engine, lambda name, threads, width: times.get(name, {}).get(threads, 0.1))
    state = engine.use("auto", 0)
    assert (state.kind, state.threads, torch.get_num_threads()) == ("quick", 2, 2)
    assert events("quick") == ["install", "test 2, first"] and events("second") == events("slow") == []
    assert (engine.table["quick"].verified, engine.table["second"].verified) == (True, False)
    assert engine.table["plain"].threads == engine.table["second"].threads == 1
    assert {threads for name, threads, width in speeds.calls if (name, width) == ("plain", 5)} == {1}
    assert "test 2, complete" in (engine.test("auto", 0), events("quick"))[1]


def test_slower_candidates_are_taken_if_the_faster_ones_fail(rows: Callable[..., None]) -> None:
    rows(quick=row(test_fails="a verify pass differs"), slow=row())
    engine, _ = started({"plain": 0.05, "quick": 0.01, "slow": 0.023})
    assert engine.use("auto", 1).kind == "slow" and engine.table["quick"].problem and not engine.table["slow"].problem


def test_a_single_candidate_is_not_measured(rows: Callable[..., None]) -> None:
    rows(unsuited=row(unsupported=lambda self: "no CPU"))
    engine, speeds = started({"plain": 0.01})
    state = engine.use("auto", 1)
    assert (state.kind, state.reason) == ("plain", "no CPU") and not speeds.calls


def test_the_enabled_strategies_decide_which_engine_is_the_fastest() -> None:
    """One with a fast decode step, one with flat verify costs."""
    quick = EngineFigures(promise="bits", step_seconds=0.020, costs=((2, 1.8), (5, 2.6), (9, 3.4)), prefill=2000.0)
    flat = EngineFigures(promise="bits", step_seconds=0.026, costs=((2, 1.0), (5, 1.1), (9, 1.2)), prefill=2000.0)
    table = {"quick": quick, "flat": flat}
    assert choose(table, Workload(1, 0)).name == "quick"
    assert choose(table, Workload(0, 1)).name == choose(table, Workload(1, 2)).name == "flat"
