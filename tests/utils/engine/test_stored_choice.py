"""The choice among engines from one start to the next: what is measured again, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest
from fake_engines import row, started

from utils.engine.engine_choice import Workload


def test_the_table_is_stored_and_nothing_is_measured_again(rows: Callable[..., None], tmp_path: Path) -> None:
    rows(quick=row(), second=row())
    times = {"plain": 0.02, "quick": 0.01, "second": 0.0101}
    engine, _ = started(times, tmp_path / "engine.json")
    first = engine.use("auto", 1)
    again, speeds = started(times, tmp_path / "engine.json")
    state = again.use("auto", 1)
    assert (state.kind, state.threads, state.verified) == (first.kind, first.threads, True) and state.tested_on
    assert again.selection.table == engine.selection.table and not speeds.calls
    installed = again._seat.engines[first.kind].events
    assert installed.count("install tested") == 1 and "install" not in installed
    # A named engine of the next start is shown with the figures of the comparison.
    named, _ = started(times, tmp_path / "engine.json")
    named.use("second", 1)
    assert started(times, tmp_path / "engine.json")[0].use("second", 1).kind == "second"
    third, _ = started(times, tmp_path / "engine.json")
    third.use("second", 1)
    assert third.selection.table == engine.selection.table


def test_a_result_keeps_its_day(rows: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(quick=row())
    times, file = {"plain": 0.02, "quick": 0.01}, tmp_path / "engine.json"
    started(times, file)[0].use("auto", 1)
    today, later = date.today(), date.today() + timedelta(days=40)
    monkeypatch.setattr("utils.engine.stored_engine.date", type("Later", (date,), {"today": lambda: later}))
    for _ in range(2):
        engine, speeds = started(times, file)
        assert engine.use("auto", 1).tested_on == today.isoformat() and not speeds.calls
        engine.store()


def test_a_failure_is_tried_again_on_another_day(
    rows: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"plain": 0.02, "quick": 0.01}
    rows(quick=row(fails=(MemoryError(),)))
    started(times, tmp_path / "engine.json")[0].use("auto", 1)
    rows(quick=row())
    today, speeds = started(times, tmp_path / "engine.json")
    assert today.use("auto", 1).kind == "plain" and not speeds.calls
    assert today.selection.table["quick"].failed
    today.store()  # which must not make the failure younger
    tomorrow = date.today() + timedelta(days=1)
    monkeypatch.setattr("utils.engine.stored_engine.date", type("Later", (date,), {"today": lambda: tomorrow}))
    assert started(times, tmp_path / "engine.json")[0].use("auto", 1).kind == "quick"


def test_a_start_with_other_strategies_chooses_anew_from_the_stored_figures(
    rows: Callable[..., None], tmp_path: Path
) -> None:
    rows(quick=row(), flat=row())
    file = tmp_path / "engine.json"
    first, _ = started({"plain": 0.05, "quick": 0.01, "flat": 0.012}, file)
    assert first.use("auto", 1).kind == "quick"
    table = first.selection.table
    first.selection.table = {
        "quick": replace(table["quick"], costs=((2, 1.9), (5, 3.0), (9, 5.0))),
        "flat": replace(table["flat"], costs=((2, 1.0), (5, 1.0), (9, 1.0))),
    }
    first.selection.workload = Workload(1, 0)
    first.store()
    for workload, expected in ((Workload(1, 0), "quick"), (Workload(0, 2), "flat"), (Workload(0, 2), "flat")):
        again, _ = started({"plain": 0.05, "quick": 0.01, "flat": 0.012}, file)
        again.selection.workload = workload
        assert again.use("auto", 1).kind == expected
        assert again.selection.table["quick"].costs == first.selection.table["quick"].costs
