"""Engines that fail while they are installed or measured, or are interrupted: what is used instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engines import FakeEngine, row, started
from fixed_speeds import fix_speeds
from tiny import tiny_llama

from utils.engine import Engine
from utils.engine.engine_table import LAYER_ENGINES
from utils.engine.seat import MAX_REASON, Seat, reason_of
from utils.errors import UserError

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


def test_a_reason_is_what_happened_not_the_place_in_the_source() -> None:
    places = "Exception from src/core.cpp:117:\nCheck 'status == 0' failed at src/node.cpp:54:\n"
    assert reason_of(RuntimeError(f"{places}no memory for the weights\n\n")) == "no memory for the weights"
    assert reason_of(RuntimeError("Exception from src/core.cpp:117:")) == "Exception from src/core.cpp:117:"
    assert reason_of(RuntimeError("\n")) == "RuntimeError"


def test_an_interrupted_installation_leaves_nothing_in_the_seat() -> None:
    half = type("Half", (FakeEngine,), {"fails": (KeyboardInterrupt(),)})()
    seat = Seat({"plain": FakeEngine(), "half": half})
    with pytest.raises(KeyboardInterrupt):
        seat.install("half", [1])
    assert seat.name == "plain" and half.events[-1] == "remove"


def test_an_engine_that_cannot_be_installed_again_is_tested_as_a_whole_the_next_time() -> None:
    fake = type("Fake", (FakeEngine,), {"fails": ("", "gone")})()
    seat, outcomes = Seat({"plain": FakeEngine(), "fake": fake}), []
    for _ in range(3):
        outcomes.append(seat.install("fake", [1]))
        seat.remove()
    assert outcomes == ["", "gone", ""]
    assert [event for event in fake.events if "install" in event] == ["install", "install tested", "install"]


def test_a_reason_is_short() -> None:
    assert reason_of(RuntimeError("x" * 5000)) == "x" * MAX_REASON


def test_an_error_of_the_plain_engine_is_not_hidden(rows: Callable[..., None]) -> None:
    rows(quick=row())
    engine = Engine([tiny_llama(vocab_size=96)])

    def speed(name: str, threads: int, width: int) -> float:
        if name == "plain":
            raise RuntimeError("the model is broken")
        return 0.01

    fix_speeds(engine, speed)
    with pytest.raises(RuntimeError, match="the model is broken"):
        engine.use("auto", 1)


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


def test_without_any_engine_there_is_an_error(rows: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    rows(only=row(fails=("it is wrong",)))
    monkeypatch.delitem(LAYER_ENGINES, "plain")
    monkeypatch.setitem(LAYER_ENGINES, "plain", row(unsupported=lambda self: "it has no such weights"))
    engine, _ = started({})
    with pytest.raises(UserError, match="it is wrong"):
        engine.use("auto", 1)
    assert engine._seat.name == "plain"
