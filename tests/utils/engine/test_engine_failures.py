"""Engines that fail while they are installed or measured, or are interrupted: what is used instead."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from re import sub
from typing import Any
from unittest import mock

import pytest
import torch
from fake_engines import events, row, started, whole_llama
from fakes import constant_costs
from fixed_speeds import fix_speeds, only_engines, steady
from stored_models import from_files, loaded
from tiny import tiny_llama

from utils.engine import Engine
from utils.engine import engine as engine_module
from utils.engine.engine import INTERRUPTED, LAYER_ENGINES
from utils.engine.layer_engine import PlainEngine
from utils.engine.module_swap import EngineLinear
from utils.engine.stored_results import ResultFile
from utils.engine.stored_weights import in_files
from utils.engine.trials import MAX_REASON, reason_of
from utils.errors import UserError

FAILURES = ["logits differ", MemoryError(), RuntimeError("no kernel\nsecond line")]


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
@pytest.mark.parametrize("step", ["trial_fails", "fails", "test_fails"])
def test_an_engine_that_fails_is_replaced_by_the_next_one(failure: Any, step: str, rows: Callable[..., None]) -> None:
    rows(broken=row(**{step: failure}), quick=row(), last=row())
    engine, _ = started({"plain": 0.02, "broken": 0.01, "quick": 0.011, "last": 0.012})
    state = engine.use("auto", 1)
    assert (state.kind, state.verified) == ("quick", True) and events("last") == []
    figures, reason = engine.table["broken"], str(failure).partition("\n")[0] or "MemoryError"
    assert figures.raised is isinstance(failure, Exception) and not figures.verified
    assert reason in figures.problem and "second line" not in figures.problem
    assert step == "trial_fails" or events("broken")[-1] == "remove"


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
@pytest.mark.parametrize("step", ["fails", "test_fails"])
def test_an_engine_that_was_asked_for_and_fails_is_an_error_of_one_sentence(
    failure: Any, step: str, rows: Callable[..., None]
) -> None:
    rows(first=row(**{step: failure}))
    engine, _ = started({"plain": 0.02, "first": 0.01})
    with pytest.raises(UserError, match="first engine failed its self-test"):
        engine.use("first", 1)
    assert engine.state.kind == "plain" and events("first")[-1] == "remove"


def test_a_reason_is_the_first_line_of_an_error() -> None:
    assert reason_of(RuntimeError("\n no memory for the weights\nat node.cpp:54\n")) == "no memory for the weights"
    assert reason_of(RuntimeError("\n")) == "RuntimeError"
    assert reason_of(RuntimeError("x" * 5000)) == "x" * MAX_REASON


def test_an_error_of_the_program_is_not_hidden_and_leaves_the_plain_engine(rows: Callable[..., None]) -> None:
    rows(quick=row())
    engine, _ = started({"plain": 0.02, "quick": 0.01})
    with (
        mock.patch.object(engine_module, "verify_costs", side_effect=RuntimeError("the model is broken")),
        pytest.raises(RuntimeError, match="the model is broken"),
    ):
        engine.use("auto", 1)
    assert (engine.state.kind, engine.state.reason) == ("plain", "the model is broken")
    assert events("quick")[-1] == "remove"


def test_an_engine_that_fails_when_it_computes_is_skipped(rows: Callable[..., None]) -> None:
    rows(broken=row())
    engine = Engine([whole_llama()])

    def speed(name: str, threads: int, width: int) -> float:
        if name == "broken" and width == 5:
            raise RuntimeError("no memory for 5 rows")
        return 0.01 if name == "broken" else 0.02

    fix_speeds(engine, speed)
    assert engine.use("auto", 1).kind == "plain" and events("broken") == []
    assert "no memory for 5 rows" in engine.table["broken"].problem


@pytest.mark.parametrize("step", ["trial_fails", "fails", "test_fails"])
def test_an_interruption_leaves_the_plain_engine(step: str, rows: Callable[..., None], tmp_path: Path) -> None:
    rows(quick=row(**{step: KeyboardInterrupt()}), last=row())
    engine, _ = started({"plain": 0.02, "quick": 0.01, "last": 0.0145}, tmp_path / "engine.json")
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        engine.use("auto", before + 1)
    assert (engine.state.kind, engine.state.reason) == ("plain", INTERRUPTED)
    assert torch.get_num_threads() == engine.state.threads == before and not (tmp_path / "engine.json").exists()
    assert step == "trial_fails" or events("quick")[-1] == "remove"
    setattr(LAYER_ENGINES["quick"], step, "")
    assert engine.use("auto", 1).kind == "quick", "it can be tried again"


def interrupted_at(report: int) -> Callable[[str], None]:
    """A report that is interrupted when it is called for the n-th time."""
    seen = count(1)

    def say(text: str) -> None:
        if next(seen) == report:
            raise KeyboardInterrupt

    return say


def assert_plain(engine: Engine, model: Any) -> None:
    """The engine says that it is plain, and nothing of another engine is left in the model."""
    assert (engine.state.kind, engine.state.verified, engine.state.reason) == ("plain", False, INTERRUPTED)
    assert type(engine._engine) is PlainEngine and engine.costs == () and not engine.step_seconds
    assert not any(isinstance(part, EngineLinear) for part in model.modules())
    assert "forward" not in vars(model) and model.config._attn_implementation == "sdpa"
    assert in_files(model)


@pytest.mark.parametrize("name", ["auto", pytest.param("invariant", marks=pytest.mark.full)])
@torch.no_grad()
def test_ctrl_c_at_any_report_leaves_the_plain_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preparation of a model whose weights are in files, interrupted at the first and the last report of each of
    its parts. `auto` has trials.
    """
    only_engines(monkeypatch, "plain", "invariant")
    monkeypatch.setattr(engine_module, "verify_costs", reported_costs)
    ids, reference, said = torch.tensor([[3, 4, 5, 60]]), tiny_llama(), list[str]()
    rehearsal, engine = Engine([from_files(tmp_path, reference)]), Engine([loaded(tmp_path)], identity="the files")
    rehearsal.report, rehearsal.meter = said.append, fix_speeds(rehearsal, FAST).meter()
    rehearsal.use(name, 1)
    engine.results, engine.meter = ResultFile(tmp_path / "engine.json"), fix_speeds(engine, FAST).meter()
    for report in first_and_last(said):
        engine.report, engine.table = interrupted_at(report), {}
        with pytest.raises(KeyboardInterrupt):
            engine.use(name, 1)
        assert_plain(engine, engine._target)
        assert torch.equal(engine._target(ids).logits, reference(ids).logits), "the weights can still be read"
        assert not (tmp_path / "engine.json").exists()
    engine.report = said.append
    assert engine.use(name, 1).kind == "invariant" and engine.state.verified


def first_and_last(said: list[str]) -> list[int]:
    """Numbers, from 1, of the first and the last of consecutive reports that differ in numbers alone."""
    parts = [sub(r"\d+", "", text) for text in ["", *said, ""]]
    chosen = [at for at in range(1, len(said) + 1) if parts[at] != parts[at - 1] or parts[at] != parts[at + 1]]
    assert len(chosen) > 8
    return chosen


FAST = steady({"plain": 0.015, "invariant": 0.01})


def reported_costs(probe: Any, *, report: Callable[[str], None], **options: Any) -> Any:
    report("measuring verify passes")
    return constant_costs(probe)


def test_without_any_engine_there_is_an_error(rows: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    rows(only=row(fails="it is wrong"))
    monkeypatch.delitem(LAYER_ENGINES, "plain")
    monkeypatch.setitem(LAYER_ENGINES, "plain", row(unsupported=lambda self: "it has no such weights"))
    engine, _ = started({})
    with pytest.raises(UserError, match="it is wrong"):
        engine.use("auto", 1)
    assert engine.state.kind == "plain"
