"""The choice among engines: by measured speed, equal bits within ten percent, and what happens if an engine fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_speeds import FixedSpeeds, fix_speeds, steady
from tiny import tiny_llama

from utils.engine import Engine
from utils.engine.engine_choice import choose, expected_speed, faster_baseline
from utils.engine.engine_figures import EngineFigures
from utils.engine.engine_table import LAYER_ENGINES, EngineRow
from utils.engine.layer_engine import BIT_IDENTICAL
from utils.engine.seat import Seat
from utils.engine.stored_results import ResultFile
from utils.errors import UserError

MEASURED = EngineFigures(
    step_seconds=0.05, costs=((2, 1.1), (5, 1.2), (9, 1.5)), prefill=500.0, threads=1, promise=BIT_IDENTICAL
)
EXACT, OTHER = replace(MEASURED, verified=True), replace(MEASURED, promise="")


class FakeEngine:
    """An engine that replaces nothing. fails: what `install` returns or raises, one for each installation."""

    promise = BIT_IDENTICAL
    fails: tuple[Any, ...] = ()
    weights = "float32"
    installations: int = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.layouts: dict[str, int] = {}
        self.events: list[str] = []

    def unsupported(self) -> str:
        return ""

    def install(self, thread_counts: Sequence[int], report: Any) -> str:
        self.events.append("install")
        return self._outcome()

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        self.events.append("install tested")
        return self._outcome()

    def _outcome(self) -> str:
        done = self.events.count("install") + self.events.count("install tested")
        outcome = self.fails[done - 1] if done <= len(self.fails) else ""
        if isinstance(outcome, BaseException):
            raise outcome
        return str(outcome)

    def self_test(self, thread_count: int, report: Any) -> str:
        self.events.append(f"test {thread_count}")
        return ""

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def nbytes(self) -> int:
        return 1000

    def remove(self) -> None:
        self.events.append("remove")


def row(**attributes: Any) -> EngineRow:
    return EngineRow(type("Fake", (FakeEngine,), attributes), "", "")


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the table of engines. The plain one is always the first row."""

    def replace_rows(**rows: EngineRow) -> None:
        for name in [*LAYER_ENGINES]:
            if name != "plain":
                monkeypatch.delitem(LAYER_ENGINES, name)
        for name, row in rows.items():
            monkeypatch.setitem(LAYER_ENGINES, name, row)

    return replace_rows


def started(times: dict[str, float], file: Path | None = None) -> tuple[Engine, FixedSpeeds]:
    engine = Engine([tiny_llama(vocab_size=96)])
    engine.results = None if file is None else ResultFile(file)
    return engine, fix_speeds(engine, steady(times))


def test_the_expected_speed_is_that_of_whole_runs() -> None:
    # 256 / 500 s of reading; 128 tokens at 20 a second, or at (1 - 0.6^5) / 0.4 / (0.05 * 1.2) = 38.42 a second
    alone, drafted = 128 / (0.512 + 6.4), 128 / (0.512 + 128 / 38.4266667)
    assert expected_speed(MEASURED) == pytest.approx((alone * drafted) ** 0.5)


@pytest.mark.parametrize("change", [{"step_seconds": 0.06}, {"costs": ((5, 1.4),)}, {"prefill": 100.0}])
def test_every_figure_counts(change: Any) -> None:
    assert expected_speed(replace(MEASURED, **change)) < expected_speed(MEASURED)


@pytest.mark.parametrize(("factor", "chosen"), [(1.02, "exact"), (1.09, "exact"), (1.12, "other"), (2.0, "other")])
def test_equal_bits_are_given_up_for_more_than_ten_percent_only(factor: float, chosen: str) -> None:
    faster = replace(OTHER, step_seconds=0.05 / factor, prefill=500.0 * factor)
    choice = choose({"other": faster, "exact": EXACT})
    assert choice.name == chosen and bool(choice.reason) is (chosen == "other")
    assert chosen == "exact" or f"{factor - 1:.0%} faster than exact" in choice.reason


def test_a_promise_that_was_not_verified_counts_for_nothing() -> None:
    faster = replace(OTHER, step_seconds=0.049)
    assert choose({"other": faster, "promised": replace(EXACT, verified=False)}).name == "other"


def test_problems_are_the_reason_if_nothing_has_equal_bits() -> None:
    problem = replace(EXACT, problem="it lacks memory")
    assert choose({"plain": OTHER, "exact": problem}).reason == "it lacks memory"
    both = {"plain": OTHER, "exact": problem, "second": replace(problem, problem="no CPU")}
    assert choose(both).reason == "exact: it lacks memory; second: no CPU"
    assert choose({"exact": problem}).name == ""


def test_a_faster_baseline_is_another_engine_with_a_clearly_shorter_step() -> None:
    table = {"plain": replace(OTHER, step_seconds=0.04), "exact": EXACT, "failed": EngineFigures(failed=True)}
    found = faster_baseline(table, "exact")
    assert found is not None and (found.name, found.factor) == ("plain", pytest.approx(1.25))
    assert faster_baseline(table, "plain") is None and faster_baseline({}, "plain") is None
    assert faster_baseline(table | {"plain": replace(OTHER, step_seconds=0.049)}, "exact") is None


def test_all_candidates_are_measured_and_the_fastest_is_installed(rows: Callable[..., None]) -> None:
    rows(slow=row(), quick=row(), unsuited=row(unsupported=lambda self: "no CPU"), other=row(weights="int8"))
    engine, speeds = started({"plain": 0.02, "slow": 0.019, "quick": 0.01})
    state = engine.use("auto", 0)
    table = engine.selection.table
    assert (state.kind, state.verified, engine._seat.name) == ("quick", True, "quick")
    assert [*table] == ["plain", "slow", "quick", "unsuited", "other"]
    assert table["unsuited"].problem == "no CPU" and "int8" in table["other"].problem
    assert dict(table["quick"].costs) == pytest.approx({2: 1.1, 5: 1.4, 9: 1.8})
    assert table["quick"].step_seconds == pytest.approx(0.01) and table["quick"].nbytes == 1000
    counts = {threads for name, threads, _ in speeds.calls if name == "quick"}
    assert counts == {count for count, _ in table["quick"].steps} and 1 in counts


def test_the_number_of_threads_is_that_of_the_chosen_engine(
    rows: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(quick=row())
    monkeypatch.setattr("utils.engine.threads.requested_threads", lambda: None)
    monkeypatch.setattr("utils.engine.threads.candidate_counts", lambda: [1, 2])
    engine = Engine([tiny_llama(vocab_size=96)])
    times = {"plain": {1: 0.02, 2: 0.03}, "quick": {1: 0.016, 2: 0.01}}
    speeds = fix_speeds(engine, lambda name, threads, width: times[name][threads])
    state = engine.use("auto", 0)
    assert (state.kind, state.threads, torch.get_num_threads()) == ("quick", 2, 2)
    assert engine.selection.table["plain"].threads == 1
    assert {threads for name, threads, width in speeds.calls if (name, width) == ("plain", 5)} == {1}
    assert "test 2" in engine._seat.engine.events or 2 in engine._seat.tested_counts()


def test_a_candidate_that_is_much_slower_is_given_up_after_its_decode_step(rows: Callable[..., None]) -> None:
    rows(slow=row())
    engine, speeds = started({"plain": 0.01, "slow": 0.016})
    assert engine.use("auto", 1).kind == "plain"
    figures = engine.selection.table["slow"]
    assert (
        "1.6 times that of plain" in engine.state.reason == figures.problem
        and figures.step_seconds
        and not figures.costs
    )
    assert {width for name, _, width in speeds.calls if name == "slow"} == {1}


def test_close_engines_are_measured_in_turns(rows: Callable[..., None]) -> None:
    rows(first=row(), second=row())
    engine, speeds = started({"plain": 0.03, "first": 0.010, "second": 0.0105})
    engine.use("auto", 1)
    order = [name for name, _, width in speeds.calls if width == 9]
    turns = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert turns == ["plain", "first", "second", "first", "second", "first"]
    assert engine.state.kind == "first"


def test_slow_models_get_one_further_turn_only(rows: Callable[..., None]) -> None:
    rows(second=row())
    engine, speeds = started({"plain": 1.0, "second": 1.05})
    assert engine.use("auto", 1).kind == "second"
    order = [name for name, _, width in speeds.calls if width == 9]
    turns = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert turns == ["plain", "second", "plain"]


def test_a_machine_that_was_busy_for_one_turn_does_not_decide(rows: Callable[..., None]) -> None:
    rows(first=row(), second=row())
    engine = Engine([tiny_llama(vocab_size=96)])
    seen: list[str] = []

    def speed(name: str, threads: int, width: int) -> float:
        seen.append(name)
        busy = name == "first" and "second" not in seen  # the first turn of the faster engine
        return {"plain": 0.03, "first": 0.010, "second": 0.0112}[name] * (1.2 if busy else 1.0)

    fix_speeds(engine, speed)
    assert engine.use("auto", 1).kind == "first"


FAILURES = ["logits differ", MemoryError(), RuntimeError("no kernel\nsecond line"), ImportError("no module")]


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
@pytest.mark.parametrize("failing", ["first", "second"])
def test_an_engine_that_fails_is_skipped_with_its_reason(failure: Any, failing: str, rows: Callable[..., None]) -> None:
    rows(**{name: row(fails=(failure,) if name == failing else ()) for name in ("first", "second")})
    engine, _ = started({"plain": 0.02, "first": 0.01, "second": 0.01})
    state = engine.use("auto", 1)
    assert state.kind == ({"first", "second"} - {failing}).pop() and state.verified
    figures = engine.selection.table[failing]
    reason = str(failure).partition("\n")[0] or "MemoryError"
    assert figures.failed and reason in figures.problem and "second line" not in figures.problem


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_an_engine_that_was_asked_for_and_fails_is_an_error_of_one_sentence(
    failure: Any, rows: Callable[..., None]
) -> None:
    rows(first=row(fails=(failure,)))
    engine, _ = started({"plain": 0.02, "first": 0.01})
    with pytest.raises(UserError, match="first engine failed its self-test"):
        engine.use("first", 1)
    assert (engine.state.kind, engine._seat.name) == ("plain", "plain")


def test_an_interrupted_installation_leaves_nothing_in_the_seat() -> None:
    half = type("Half", (FakeEngine,), {"fails": (KeyboardInterrupt(),)})()
    seat = Seat({"plain": FakeEngine(), "half": half})
    with pytest.raises(KeyboardInterrupt):
        seat.install("half", [1])
    assert seat.name == "plain" and half.events[-1] == "remove"


def test_an_engine_that_fails_when_it_computes_is_skipped(rows: Callable[..., None]) -> None:
    rows(broken=row())
    engine = Engine([tiny_llama(vocab_size=96)])

    def speed(name: str, threads: int, width: int) -> float:
        if name == "broken" and width == 5:
            raise RuntimeError("no memory for 5 rows")
        return 0.01 if name == "broken" else 0.02

    fix_speeds(engine, speed)
    assert engine.use("auto", 1).kind == "plain" == engine._seat.name
    assert "no memory for 5 rows" in engine.selection.table["broken"].problem


def test_if_the_chosen_engine_cannot_be_installed_again_the_next_one_is_used(rows: Callable[..., None]) -> None:
    rows(quick=row(fails=("", "gone")), last=row())
    engine, _ = started({"plain": 0.02, "quick": 0.01, "last": 0.0145})
    assert engine.use("auto", 1).kind == "last"
    assert engine.selection.table["quick"].failed and "gone" in engine.selection.table["quick"].problem


@pytest.mark.parametrize("fails", [(KeyboardInterrupt(),), ("", KeyboardInterrupt())])
def test_an_interruption_leaves_the_plain_engine(fails: Any, rows: Callable[..., None], tmp_path: Path) -> None:
    rows(quick=row(fails=fails), last=row())
    engine, _ = started({"plain": 0.02, "quick": 0.01, "last": 0.0145}, tmp_path / "engine.json")
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        engine.use("auto", 0)
    assert (engine.state.kind, engine._seat.name) == ("plain", "plain") and "interrupted" in engine.state.reason
    assert engine.step_seconds == 0 and engine.costs == (), "no costs of another engine"
    assert torch.get_num_threads() == before and not (tmp_path / "engine.json").exists()
    assert engine._seat.engines["quick"].events[-1] == "remove"
    assert engine.use("auto", 1).kind == "quick", "it can be tried again"


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


def test_a_single_candidate_is_not_measured(rows: Callable[..., None]) -> None:
    rows(unsuited=row(unsupported=lambda self: "no CPU"))
    engine, speeds = started({"plain": 0.01})
    state = engine.use("auto", 1)
    assert (state.kind, state.reason) == ("plain", "no CPU") and not speeds.calls


def test_without_any_engine_there_is_an_error(rows: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    rows(only=row(fails=("it is wrong",)))
    monkeypatch.delitem(LAYER_ENGINES, "plain")
    monkeypatch.setitem(LAYER_ENGINES, "plain", row(unsupported=lambda self: "it has no such weights"))
    engine, _ = started({})
    with pytest.raises(UserError, match="it is wrong"):
        engine.use("auto", 1)
    assert engine._seat.name == "plain"
