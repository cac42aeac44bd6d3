"""Results of trials and self-tests from one start to the next: what is used, rechecked, kept, and not trusted."""

from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_engines import events, row, started
from fixed_speeds import FixedSpeeds, only_engines, prefer
from stored_starts import edit, only_entry, prepared, start
from tiny import tiny_mamba

from utils.engine import Engine, engine, forward_timing, machine, selftest
from utils.engine.engine_choice import Workload
from utils.engine.module_swap import EngineLinear
from utils.engine.stored_results import MAX_ENTRIES, EntryFile, ResultFile


@pytest.fixture(autouse=True)
def _invariant_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")  # calls of the self-test are counted
    prefer("invariant")


@pytest.mark.parametrize("int8", [False, True])
def test_the_second_start_rechecks_a_slice_and_uses_the_stored_costs(
    file: ResultFile, tests: mock.Mock, int8: bool
) -> None:
    first = start(file, int8=int8)
    assert tests.call_count == 1 and first.state.verified and not first.state.tested_on
    first.draft_seconds["head"] = 0.25
    first.store()
    with (
        mock.patch.object(engine, "verify_costs") as measured,
        mock.patch.object(selftest, "slice_dependence", return_value="") as rechecked,
    ):
        second = start(file, int8=int8)
    assert tests.call_count == 1 and not measured.called and rechecked.call_count == 1
    assert second.state.verified and second.state.tested_on in second.state.sentence()
    assert (second.step_seconds, second.costs) == (first.step_seconds, first.costs)
    assert (second.state.threads, second.state.weights) == (first.state.threads, first.state.weights)
    assert second.draft_seconds == {"head": 0.25}


def test_rules_about_outputs_that_are_not_compared_do_not_stop_a_later_start(
    file: ResultFile, tests: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "TESTED_HEAD", 40)
    for _ in range(2):
        engine = prepared(file)
        engine._target.generation_config.suppress_tokens = [3, 95]
        engine.use("auto", 1)
    assert tests.call_count == 1 and engine.state.tested_on


@pytest.mark.parametrize(("step", "wide", "too_few"), [(0.7, 0.7, True), (0.8, 0.8, False), (1.0, 0.4, True)])
def test_a_number_of_threads_that_a_busy_machine_had_chosen_is_chosen_anew(
    step: float, wide: float, too_few: bool, file: ResultFile, tests: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of a step and of a wide pass with two threads, where one needs a second for each. A requested number
    stays.
    """
    monkeypatch.setattr(machine, "candidate_threads", lambda: [1, 2])
    monkeypatch.setattr(machine, "requested_threads", lambda: 0)
    first = start(file, threads=0)
    edit(file, {"threads": 1})
    speeds = FixedSpeeds(lambda name, threads, width: 1.0 if threads == 1 else step if width == 1 else wide)
    monkeypatch.setattr(forward_timing, "perf_counter", lambda: speeds.now)
    best = forward_timing.faster_threads
    monkeypatch.setattr(engine, "faster_threads", lambda _, *counts: best(speeds.probe("invariant"), *counts))
    second = start(file, threads=0)
    assert first.state.verified and tests.call_count == 1 + too_few
    assert bool(second.state.tested_on) is not too_few and (too_few or second.state.threads == 1)
    file.path.unlink()
    third = start(file, threads=0)  # whose trials find one thread as fast
    assert (third.state.threads, third.table["invariant"].threads) == ((2, 2) if too_few else (1, 1))
    calls = len(speeds.calls)
    for _ in range(2):
        assert start(file, threads=1).state.verified
    assert len(speeds.calls) == calls > 0


def test_the_whole_test_can_be_asked_for(file: ResultFile, tests: mock.Mock) -> None:
    start(file)
    second = start(file)
    assert second.state.tested_on and tests.call_count == 1
    layer = second._target.lm_head
    state = second.test("auto", 1)
    assert tests.call_count == 2 and state.verified and not state.tested_on
    assert isinstance(second._target.lm_head, EngineLinear) and second._target.lm_head is not layer
    rounded = start(file, int8=True)
    count = tests.call_count
    assert rounded.test("auto", 1).verified and tests.call_count == count + 1


def test_a_test_that_is_asked_for_is_made_even_if_the_file_cannot_be_written(
    file: ResultFile, tests: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(file)
    second = start(file)
    monkeypatch.setattr(EntryFile, "put", lambda self, key, entry: None)
    assert not second.test("auto", 1).tested_on and tests.call_count == 2


def test_costs_of_models_that_stay_plain_are_stored_too(file: ResultFile) -> None:
    def plain() -> Engine:
        started = Engine([tiny_mamba(vocab_size=96)], identity="the files")
        started.results = file
        started.use("auto", 1)
        return started

    first = plain()
    with mock.patch.object(engine, "verify_costs") as measured:
        second = plain()
    assert not measured.called and second.costs == first.costs
    assert second.state == first.state and not second.state.verified and second.state.reason


def test_only_the_newest_results_are_kept(file: ResultFile) -> None:
    assert file.get("nothing") is None
    for number in range(MAX_ENTRIES + 1):
        file.put(str(number), {"number": number})
    assert file.get("0") is None and file.get("1") == {"number": 1}
    file.put("1", {})
    assert not file.get("1") and file.get("2") == {"number": 2}


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"null", b'{"format": 3}', b"9" * 5000])
def test_a_damaged_or_foreign_file_counts_as_absent_and_is_replaced(content: bytes, file: ResultFile) -> None:
    entries = EntryFile(file.path)
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    assert entries.get("key") is None
    entries.put("key", {"a": 1, "pairs": ((1, 2.5),)})
    assert EntryFile(file.path).get("key") == {"a": 1, "pairs": ((1, 2.5),)}


def test_an_entry_of_another_form_counts_as_absent(file: ResultFile, tests: mock.Mock) -> None:
    start(file)
    changes: list[Any] = [{"unknown": 1}, {"table": 3}, {"longer": [1]}]
    for count, change in enumerate(changes, 2):
        edit(file, change)
        assert not start(file).state.tested_on and tests.call_count == count, change
        assert only_entry(file)["kind"] == "invariant" and only_entry(file)["threads"] == 1


def test_a_file_that_cannot_be_written_costs_only_time(tmp_path: Path, tests: mock.Mock) -> None:
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken" / "engine.json", tmp_path):
        assert start(ResultFile(path)).state.verified and start(ResultFile(path)).state.verified
    assert tests.call_count == 4 and [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_table_is_stored_and_nothing_is_measured_again(rows: Callable[..., None], tmp_path: Path) -> None:
    rows(quick=row(), second=row())
    times, file = {"plain": 0.02, "quick": 0.01, "second": 0.0101}, tmp_path / "engine.json"
    engine, _ = started(times, file)
    first = engine.use("auto", 1)
    again, speeds = started(times, file)
    state = again.use("auto", 1)
    assert (state.kind, state.threads, state.verified) == (first.kind, first.threads, True) and state.tested_on
    assert again.table == engine.table and not speeds.calls
    assert events("quick") == ["install", "test 1, first", "install", "test 1, later"] and events("second") == []


def test_a_result_keeps_its_day(rows: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(quick=row())
    times, file = {"plain": 0.02, "quick": 0.01}, tmp_path / "engine.json"
    started(times, file)[0].use("auto", 1)
    today, later = date.today(), date.today() + timedelta(days=40)
    monkeypatch.setattr("utils.engine.engine.date", type("Later", (date,), {"today": lambda: later}))
    for _ in range(2):
        again, speeds = started(times, file)
        assert again.use("auto", 1).tested_on == today.isoformat() and not speeds.calls
        again.store()


@pytest.mark.parametrize("step", ["trial_fails", "fails", "test_fails"])
def test_an_engine_that_raised_an_error_is_tried_again(step: str, rows: Callable[..., None], tmp_path: Path) -> None:
    """Such as a lack of memory, or a wrapper around the model's forward pass."""
    times, file = {"plain": 0.02, "quick": 0.01}, tmp_path / "engine.json"
    rows(quick=row(**{step: TypeError("no such argument")}))
    assert started(times, file)[0].use("auto", 1).kind == "plain" and not file.exists()
    rows(quick=row())
    assert started(times, file)[0].use("auto", 1).kind == "quick"


@pytest.mark.parametrize("step", ["trial_fails", "fails", "test_fails"])
@pytest.mark.parametrize("failure", ["its logits differ", NotImplementedError("its attention has a sink")], ids=repr)
def test_an_engine_with_other_numbers_is_not_tried_again(
    failure: Any, step: str, rows: Callable[..., None], tmp_path: Path
) -> None:
    times, file = {"plain": 0.02, "quick": 0.01}, tmp_path / "engine.json"
    rows(quick=row(**{step: failure}))
    started(times, file)[0].use("auto", 1)
    rows(quick=row())
    again, speeds = started(times, file)
    assert again.use("auto", 1).kind == "plain" and not speeds.calls
    assert str(failure) in again.table["quick"].problem


def test_a_start_with_other_strategies_chooses_anew_from_the_stored_figures(
    rows: Callable[..., None], tmp_path: Path
) -> None:
    rows(quick=row(), flat=row())
    times, file = {"plain": 0.05, "quick": 0.01, "flat": 0.012}, tmp_path / "engine.json"
    first, _ = started(times, file)
    assert first.use("auto", 1).kind == "quick"
    first.table |= {
        "quick": replace(first.table["quick"], costs=((2, 1.9), (5, 3.0), (9, 5.0))),
        "flat": replace(first.table["flat"], costs=((2, 1.0), (5, 1.0), (9, 1.0))),
    }
    first.workload = Workload(1, 0)
    first.store()
    for workload, expected in ((Workload(1, 0), "quick"), (Workload(0, 2), "flat"), (Workload(0, 2), "flat")):
        again, speeds = started(times, file)
        again.workload = workload
        assert again.use("auto", 1).kind == expected and not speeds.calls
        assert again.table["quick"].costs == first.table["quick"].costs
