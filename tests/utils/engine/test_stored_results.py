"""Results of the self-test from one start to the next: used only where nothing has changed, never trusted blindly."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fixed_speeds import only_engines, prefer
from tiny import tiny_llama, tiny_mamba

from utils.engine import Engine, engine, fingerprint, selftest
from utils.engine.kernels import PackedKernel
from utils.engine.module_swap import EngineLinear
from utils.engine.stored_results import MAX_BYTES, MAX_ENTRIES, ResultFile, entry_digest
from utils.engine.weight_format import EngineWeights


@pytest.fixture(autouse=True)
def _invariant_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, "plain", "invariant")  # calls of the self-test are counted
    prefer("invariant")


@pytest.fixture
def file(tmp_path: Path) -> ResultFile:
    return ResultFile(tmp_path / "cache" / "engine.json")


@pytest.fixture
def tests() -> Iterator[mock.Mock]:
    """Counts the self-tests, which still run, and returns the threads to what they were."""
    threads = torch.get_num_threads()
    with mock.patch.object(selftest, "width_dependence", wraps=selftest.width_dependence) as counted:
        yield counted
    torch.set_num_threads(threads)


def start(file: ResultFile, *, threads: int = 1, name: str = "auto", int8: bool = False, **model: Any) -> Engine:
    """What a start of the program does, with the same models each time unless `model` says otherwise."""
    started = Engine([tiny_llama(**{"vocab_size": 96} | model)], weights=EngineWeights("int8" if int8 else "float32"))
    started.results = file
    started.use(name, threads)
    return started


def edit(file: ResultFile, changes: Any, *, signed: bool = True) -> None:
    """Change fields of the only entry. signed: as if `put` had written them."""
    content = json.loads(file.path.read_text())
    ((key, entry),) = content["entries"].items()
    entry |= changes
    content["entries"][key] = entry | ({"digest": entry_digest(key, entry)} if signed else {})
    file.path.write_text(json.dumps(content))


def only_entry(file: ResultFile) -> dict[str, Any]:
    (entry,) = json.loads(file.path.read_text())["entries"].values()
    return entry


@pytest.mark.parametrize("int8", [False, True])
def test_the_second_start_rechecks_one_width_and_uses_the_stored_costs(
    file: ResultFile, tests: mock.Mock, int8: bool
) -> None:
    first = start(file, int8=int8)
    assert tests.call_count == 1 and first.state.verified and not first.state.tested_on
    first.draft_seconds["head"] = 0.25
    first.store()
    with (
        mock.patch.object(engine, "verify_costs") as measured,
        mock.patch.object(selftest, "one_width_differs", return_value="") as rechecked,
    ):
        second = start(file, int8=int8)
    assert tests.call_count == 1 and not measured.called and rechecked.call_count == 1
    assert second.state.verified and second.state.tested_on in second.state.sentence()
    assert (second.step_seconds, second.costs) == (first.step_seconds, first.costs)
    assert (second.state.threads, second.state.weights) == (first.state.threads, first.state.weights)
    assert second.draft_seconds == {"head": 0.25}


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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"format": 3}',
        b" " * (MAX_BYTES + 1),
        b"9" * 5000,
    ],
)
def test_a_damaged_or_foreign_file_counts_as_absent(content: bytes, file: ResultFile, tests: mock.Mock) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    assert not start(file).state.tested_on and tests.call_count == 1
    assert start(file).state.tested_on and tests.call_count == 1, "the file was replaced by a valid one"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "second"},
        {"kind": 3},
        {"threads": 0},
        {"threads": True},
        {"threads": 10**30},
        {"tested_counts": "12"},
        {"tested_on": "today"},
        {"tested_on": "\x1b[31m"},
        {"layouts": {"32x32": "x"}},
        {"layouts": [1]},
        {"step_seconds": 0},
        {"step_seconds": float("nan")},
        {"step_seconds": "1"},
        {"costs": [-1]},
        {"costs": [float("inf")]},
        {"costs": 3},
        {"draft_seconds": {"head": None}},
        {"reason": None},
        {"reason": "x" * 100_000},
    ],
)
def test_a_damaged_entry_counts_as_absent(change: Any, file: ResultFile, tests: mock.Mock) -> None:
    start(file)
    edit(file, change)
    assert not start(file).state.tested_on and tests.call_count == 2
    assert only_entry(file)["kind"] == "invariant"
    edit(file, {"layouts": {"96x32": 1}}, signed=False)  # a valid value, but not the one that was written
    assert not start(file).state.tested_on and tests.call_count == 3


@pytest.mark.parametrize("layouts", [{}, {"32x32": 0}, {"96x32": 7}, {"96x32": 1024}, {"not a shape": 1}])
def test_layouts_that_do_not_fit_give_no_wrong_guarantee(
    layouts: dict[str, int], file: ResultFile, tests: mock.Mock
) -> None:
    first = start(file)
    context = [5 * index % 96 for index in range(20)]
    logits = first._target(torch.tensor([context])).logits
    edit(file, {"layouts": only_entry(file)["layouts"] | layouts})
    again = start(file)
    assert again.state.verified
    assert torch.allclose(again._target(torch.tensor([context])).logits, logits, atol=1e-4)


def test_a_number_of_threads_that_was_not_tested_is_not_verified(file: ResultFile) -> None:
    start(file)
    edit(file, {"tested_counts": []})
    assert not start(file).state.verified


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
    monkeypatch.setattr(ResultFile, "_write", lambda self, entries: False)
    assert not second.test("auto", 1).tested_on and tests.call_count == 2


def test_costs_of_models_that_stay_plain_are_stored_too(file: ResultFile) -> None:
    def plain() -> Engine:
        started = Engine([tiny_mamba(vocab_size=96)])
        started.results = file
        started.use("auto", 1)
        return started

    first = plain()
    with mock.patch.object(engine, "verify_costs") as measured:
        second = plain()
    assert not measured.called and second.costs == first.costs
    assert second.state == first.state and not second.state.verified and second.state.reason


def test_a_file_that_cannot_be_written_costs_only_time(tmp_path: Path, tests: mock.Mock) -> None:
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken" / "engine.json", tmp_path):
        assert start(ResultFile(path)).state.verified and start(ResultFile(path)).state.verified
    assert tests.call_count == 4 and [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_only_the_newest_results_are_kept(file: ResultFile) -> None:
    result = file.get("nothing")
    assert result is None
    start(file)
    (key,) = json.loads(file.path.read_text())["entries"]
    result = file.get(key)
    assert result is not None
    for number in range(MAX_ENTRIES):
        file.put(str(number), result)
    assert file.get(key) is None and file.get("0") == file.get(str(MAX_ENTRIES - 1)) == result
    file.drop("0")
    assert file.get("0") is None and file.get("1") == result
