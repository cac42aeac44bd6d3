"""Stored results of the self-test are used only where nothing has changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fixed_speeds import only_engines, prefer
from stored_starts import start
from tiny import tiny_llama

from utils.engine import fingerprint, selftest
from utils.engine.kernels import PackedKernel
from utils.engine.module_swap import EngineLinear
from utils.engine.stored_results import ResultFile


@pytest.fixture(autouse=True)
def _invariant_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")  # calls of the self-test are counted
    prefer("invariant")


def change_the_source(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    patch.setattr(fingerprint, "source_digest", lambda: "newer")
    return {}


def change_torch(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    patch.setattr(fingerprint.torch, "__version__", "9.9.9")
    return {}


def install_openvino(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    patch.setattr(fingerprint, "version", lambda package: "9.9.9")
    return {}


def change_the_processor(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    facts = fingerprint.machine_facts() | {"cpu": "another"}
    patch.setattr(fingerprint, "machine_facts", lambda: facts)
    return {}


def lose_an_instruction_set(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    """A virtual machine may move to a host with the same name of its processor."""
    patch.setattr(fingerprint, "cpu_features", lambda: ["sse"])
    return {}


def change_a_drafter(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    """Its time is stored."""
    read = Path.read_bytes
    patch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "cross_tokenizer.py"))
    return {}


def allow_reduced_precision(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    patch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    return {}


def set_a_variable(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    patch.setenv("OMP_PROC_BIND", "true")
    return {}


def ask_for_threads(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    return {"threads": 2}


def name_the_engine(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    return {"name": "invariant"}


def take_other_weights(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    return {"seed": 1}


def change_the_config(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    return {"rope_theta": 500.0}


def round_the_weights(patch: pytest.MonkeyPatch, file: ResultFile) -> dict[str, Any]:
    return {"int8": True}


@pytest.mark.parametrize(
    "change",
    [
        change_the_source,
        change_torch,
        install_openvino,
        change_the_processor,
        lose_an_instruction_set,
        change_a_drafter,
        allow_reduced_precision,
        set_a_variable,
        ask_for_threads,
        name_the_engine,
        take_other_weights,
        change_the_config,
        round_the_weights,
    ],
)
def test_everything_is_tested_again_when_something_changes(
    change: Callable[..., dict[str, Any]], file: ResultFile, tests: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(file)
    fingerprint.environment.cache_clear()
    other = change(monkeypatch, file)
    changed = start(file, **other)
    assert tests.call_count >= 2 and changed.state.verified and not changed.state.tested_on
    monkeypatch.undo()
    fingerprint.environment.cache_clear()
    assert start(file).state.tested_on, "the earlier result is still there"


def test_a_single_changed_weight_is_noticed() -> None:
    model = tiny_llama(vocab_size=96)
    before = fingerprint.result_key([model])
    model.model.layers[0].mlp.up_proj.weight.data[3, 3] *= 1 + 1e-6
    assert before and fingerprint.result_key([model]) != before
    assert fingerprint.result_key([model.to("meta")]) is None


def test_a_recheck_that_fails_leads_to_the_whole_test(file: ResultFile, tests: mock.Mock) -> None:
    start(file)
    with mock.patch.object(selftest, "one_width_differs", return_value="a verify pass of 3 tokens differs"):
        again = start(file)
    assert tests.call_count == 2 and again.state.verified and not again.state.tested_on


def test_the_recheck_notices_rows_that_depend_on_the_others(file: ResultFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine computes differently from how it did when the result was stored."""
    start(file)
    product = PackedKernel.product
    monkeypatch.setattr(PackedKernel, "product", lambda self, x: product(self, x) * (1 + 1e-6 * (x.shape[-2] > 1)))
    again = start(file)
    assert (again.state.kind, again.state.verified, again.state.tested_on) == ("plain", False, "")
    assert not any(isinstance(part, EngineLinear) for part in again._target.modules())
