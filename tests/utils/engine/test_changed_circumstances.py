"""Stored results of the self-test are used only where nothing has changed."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from fixed_speeds import only_engines, prefer
from stored_starts import prepared, start

from utils.engine import selftest, stored_results
from utils.engine.compiled_products import CompiledKernel
from utils.engine.module_swap import EngineLinear
from utils.engine.stored_results import ResultFile

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _invariant_is_fastest(monkeypatch: Patch) -> None:
    only_engines(monkeypatch, "plain", "invariant")  # calls of the self-test are counted
    prefer("invariant")


def another_processor(patch: Patch) -> None:
    facts = stored_results.machine_facts() | {"cpu": "another"}
    patch.setattr(stored_results, "machine_facts", lambda: facts)


def other_source(patch: Patch) -> None:
    """Of a drafter, whose time is stored."""
    read = Path.read_bytes
    patch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "cross_tokenizer.py"))


CHANGES: dict[str, Callable[[Patch], None]] = {
    "source": other_source,
    "torch": lambda patch: patch.setattr(stored_results.torch, "__version__", "9.9.9"),
    "llvmlite": lambda patch: patch.setattr(stored_results, "version", lambda package: "9.9.9"),
    "processor": another_processor,
    # A virtual machine may move to a host with the same name of its processor.
    "instructions": lambda patch: patch.setattr(stored_results, "cpu_features", lambda: ["sse"]),
    "precision": lambda patch: patch.setenv("NVIDIA_TF32_OVERRIDE", "1"),
    "variable": lambda patch: patch.setenv("OMP_PROC_BIND", "true"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_results_of_other_circumstances_have_another_key(change: str, file: ResultFile, monkeypatch: Patch) -> None:
    engine = prepared(file)
    key = engine._key_of("auto", 1)
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        stored_results.environment.cache_clear()
        assert engine._key_of("auto", 1) != key
    stored_results.environment.cache_clear()
    assert engine._key_of("auto", 1) == key


def test_results_of_other_requests_have_another_key(file: ResultFile) -> None:
    engines = [prepared(file), prepared(file, int8=True), prepared(file, identity="other files")]
    keys = [engine._key_of("auto", 1) for engine in engines]
    keys += [engines[0]._key_of("auto", 2), engines[0]._key_of("invariant", 1)]
    assert all(keys) and len({*keys}) == len(keys)
    assert prepared(file, identity="")._key_of("auto", 1) == "", "nothing is stored for unknown files"


def test_everything_is_tested_again_when_something_changes(
    file: ResultFile, tests: mock.Mock, monkeypatch: Patch
) -> None:
    start(file)
    with monkeypatch.context() as patch:
        CHANGES["source"](patch)
        stored_results.environment.cache_clear()
        changed = start(file)
        assert tests.call_count == 2 and changed.state.verified and not changed.state.tested_on
    stored_results.environment.cache_clear()
    assert start(file).state.tested_on and tests.call_count == 2, "the earlier result is still there"


def test_a_recheck_that_fails_leads_to_the_whole_test(file: ResultFile, tests: mock.Mock) -> None:
    start(file)
    with mock.patch.object(selftest, "slice_dependence", return_value="a verify pass of 3 tokens differs"):
        again = start(file)
    assert tests.call_count == 2 and again.state.verified and not again.state.tested_on


def test_the_recheck_notices_rows_that_depend_on_the_others(file: ResultFile, monkeypatch: Patch) -> None:
    """The machine computes differently from how it did when the result was stored."""
    start(file)
    product = CompiledKernel.__call__
    monkeypatch.setattr(CompiledKernel, "__call__", lambda self, x: product(self, x) * (1 + 1e-6 * (len(x) > 1)))
    again = start(file)
    assert (again.state.kind, again.state.verified, again.state.tested_on) == ("plain", False, "")
    assert not any(isinstance(part, EngineLinear) for part in again._target.modules())
