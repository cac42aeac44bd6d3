"""Memory: what an engine takes while it starts, and engines for which memory does not suffice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_engines import events, row, started, whole_llama
from fixed_speeds import fix_speeds, steady
from paths import ROOT
from stored_models import from_files
from tiny import tiny_llama
from torch import nn

from utils.decode.model_info import cache_bytes
from utils.engine import Engine, forward_timing, weight_format
from utils.engine.compiled_products import CompiledKernel
from utils.engine.engine import LAYER_ENGINES
from utils.engine.invariant import InvariantEngine
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError

CASES = ["float32", "bfloat16", "int8", "int4"]
SHARES = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.26, "int4": 0.18}  # of the weights as loaded
# Keys and values of sessions, layers that are being read and rounded, and what the allocator keeps: less than half of
# the model in float32, so that a second copy of its weights in that format is noticed in every case.
OVERHEAD = 32_000_000
SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "initializer_range": 0.02}


@pytest.mark.parametrize("cases", [CASES[::2], pytest.param(CASES[1::2], marks=pytest.mark.full)], ids="-".join)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much memory a process had at most")
def test_an_engine_never_holds_the_weights_twice(cases: list[str], tmp_path: Path) -> None:
    """A model of 48 MB in float32, in a process of its own, after one with fewer layers of the same shapes."""
    layers = {"small": 1, "large": 16}
    models = {name: tiny_llama(**SHAPE, num_hidden_layers=count) for name, count in layers.items()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in models]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "utils" / "engine")))
    program = [sys.executable, str(Path(__file__).with_name("peak_memory.py")), *folders, *cases]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(program, check=True, capture_output=True, text=True, env=environment).stdout
    loaded = sum(part.nbytes for part in models["large"].parameters())
    for case, found in json.loads(output).items():
        final = SHARES[case] * loaded
        assert final <= 1.05 * found["weights"] <= 1.2 * final, (case, found)
        assert found["peak"] <= 1.2 * final + OVERHEAD, (case, found)


def test_installing_unpacks_no_weight_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output head in float32 takes more than many layers in 4 bits."""
    monkeypatch.setattr(CompiledKernel, "weight", mock.Mock(side_effect=AssertionError))
    engine = InvariantEngine([tiny_llama(hidden_size=64)], [nn.Linear(64, 32)], EngineWeights("int4"))
    assert not engine.install()


def with_memory(engine: Engine, count: int) -> Engine:
    engine.available = lambda: count
    return engine


@pytest.fixture
def no_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a tiny model count for something."""
    monkeypatch.setattr(weight_format, "BUFFERS", 0)
    monkeypatch.setattr(weight_format, "CONTEXT", 1)
    monkeypatch.setattr(weight_format, "LONG", 1)


def working(engine: Engine) -> int:
    return weight_format._working_bytes(engine._models, engine._weights)


@pytest.mark.parametrize(
    "name", ["auto", *(pytest.param(name, marks=pytest.mark.full) for name in ("plain", "invariant"))]
)
def test_an_engine_that_does_not_fit_is_refused_with_figures_and_what_would_fit(
    name: str, tmp_path: Path, no_overhead: None
) -> None:
    model = tiny_llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    total = sum(part.nbytes for part in model.parameters())  # 37.9 MB
    engine = with_memory(Engine([from_files(tmp_path, model)]), total // 2)
    installed: list[str] = []
    engine.report = installed.append
    with pytest.raises(
        UserError, match=r"needs 3\d\.\d MB of memory, and 1\d\.\d MB are available\. What would fit"
    ) as error:
        engine.use(name, 1)
    message = str(error.value)
    assert "--engine-weights int8" in message and "--engine-weights int4" in message and "--dtype" not in message
    assert not installed and engine.state.kind == "plain", "nothing was read"
    with pytest.raises(UserError, match="Use a smaller model"):
        with_memory(engine, total // 50).use(name, 1)
    rounded = with_memory(Engine([engine._target], weights=EngineWeights("int8")), total // 2)
    assert rounded.use("invariant", 1).verified
    assert with_memory(engine, 2 * total).use("plain", 1).kind == "plain"


def test_the_budget_has_room_for_the_longer_text_in_which_costs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(max_position_embeddings=8192)
    engine = Engine([model])
    budget = working(engine)
    monkeypatch.setattr(weight_format, "LONG", 1)
    shorter = cache_bytes(model, weight_format.CONTEXT)
    assert budget - working(engine) == cache_bytes(model, forward_timing.LONG) - shorter > 0


def test_auto_skips_only_what_does_not_fit(rows: Callable[..., None]) -> None:
    rows(big=row(size=10**9), quick=row(size=10**6))
    engine, speeds = started({"plain": 0.02, "big": 0.001, "quick": 0.01})
    with_memory(engine, working(engine) + 10**8)
    assert engine.use("auto", 1).kind == "quick"
    assert "needs 1.2 GB of memory" in engine.table["big"].problem
    assert events("big") == [] and "big" not in {name for name, *_ in speeds.calls}
    with pytest.raises(UserError, match=r"needs 1\.2 GB of memory, and .* are available"):
        engine.use("big", 1)
    assert engine.state.kind == "quick", "the engine in use stays"


def test_the_least_need_of_all_engines_is_named(rows: Callable[..., None]) -> None:
    rows(plain=row(size=2 * 10**9), small=row(size=10**9))
    engine, _ = started({"plain": 0.01, "small": 0.01})
    with pytest.raises(UserError, match=r"needs 1\.\d GB of memory"):
        with_memory(engine, 0).use("auto", 1)


def test_memory_that_the_engine_in_use_holds_counts_as_free(rows: Callable[..., None]) -> None:
    rows(first=row(size=10**9), second=row(size=10**9))
    engine = Engine([whole_llama()])
    fix_speeds(engine, steady({"plain": 1.0, "first": 0.1, "second": 0.2}))
    free = working(engine) + 10**9
    assert with_memory(engine, free).use("first", 1).kind == "first"
    assert with_memory(engine, free - 10**9 + 10**6).use("second", 1).kind == "second"
    with pytest.raises(UserError, match="available"):
        with_memory(Engine([whole_llama()]), free - 10**9 + 10**6).use("second", 1)


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        pytest.param(kind, stored, marks=() if (stored is torch.float32) == bool(index % 2) else pytest.mark.full)
        for index, kind in enumerate(CASES)
        for stored in (torch.float32, torch.bfloat16, torch.float16)
    ],
)
def test_what_is_planned_before_weights_are_read_is_what_kernels_hold(
    stored: torch.dtype, kind: str, tmp_path: Path
) -> None:
    """Values that a file holds in 16 bits need no more memory than there."""
    model = from_files(tmp_path, tiny_llama(vocab_size=96, hidden_size=128, intermediate_size=256).to(stored))
    engine = LAYER_ENGINES["invariant"]([model], [], EngineWeights(kind))
    before, need = engine.nbytes(), engine.need()
    assert engine.install(lambda text: None) == ""
    assert 0.7 * need <= engine.nbytes() - before <= 1.05 * need
