"""The openvino engine during trials: put aside and used again without compiling, for several numbers of threads."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from tiny import tiny_llama
from transformers import PreTrainedModel

from utils.decode.engine_forward import engine_forward
from utils.engine import openvino_support
from utils.engine.engine_table import PlainEngine
from utils.engine.invariant import InvariantEngine
from utils.engine.layer_engine import ParkingEngine
from utils.engine.mapped_weights import mapped_ranges
from utils.engine.module_swap import EngineLinear
from utils.engine.openvino_engine import OpenVinoEngine
from utils.engine.seat import Seat
from utils.engine.weight_format import EngineWeights

pytestmark = pytest.mark.skipif(bool(openvino_support.unsupported("float32")), reason="OpenVINO is not installed")
IDS = torch.tensor([[5 * index % 96 for index in range(12)]])
PLENTY = 1 << 40


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_llama(vocab_size=96)


@pytest.fixture
def seat(model: PreTrainedModel) -> Seat:
    torch.set_num_threads(1)
    classes = {"plain": PlainEngine, "invariant": InvariantEngine, "openvino": OpenVinoEngine}
    return Seat({name: kind([model], (), EngineWeights()) for name, kind in classes.items()})


@pytest.fixture
def compilations() -> Iterator[mock.Mock]:
    from utils.engine.openvino_segments import OpenVinoSegments

    compiled = OpenVinoSegments._compile
    with mock.patch.object(OpenVinoSegments, "_compile", autospec=True, side_effect=compiled) as counted:
        yield counted


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits.clone()


def test_each_number_of_threads_is_compiled_once_during_trials(seat: Seat, compilations: mock.Mock) -> None:
    seat.begin_trials(lambda: PLENTY)
    assert seat.install("openvino", [1]) == ""
    for count in (1, 2, 2, 1, 2, 1):
        seat.engine.set_threads(count)
    seat.install("plain", [])
    assert seat.can_switch(["plain", "openvino"]) and seat.install("openvino", [1]) == ""
    assert compilations.call_count == 2
    seat.end_trials()
    seat.engine.set_threads(2)
    assert compilations.call_count == 3, "graphs of other numbers were released"


def test_engines_alternate_and_keep_their_logits(seat: Seat, model: PreTrainedModel, compilations: mock.Mock) -> None:
    expected = {"plain": logits(model)}
    seat.begin_trials(lambda: PLENTY)
    for name in ("openvino", "invariant"):
        assert seat.install(name, [1]) == ""
        expected[name] = logits(model)
    kernel = model.lm_head
    for name in ("openvino", "invariant") * 2:
        assert seat.can_switch(["openvino", "invariant"]) and seat.install(name, [1]) == ""
        assert torch.equal(logits(model), expected[name]) and model.lm_head is kernel
    seat.install("openvino", [1])
    assert seat.end_trials() == "" and seat.name == "openvino"
    assert torch.equal(logits(model), expected["openvino"])
    assert not any(isinstance(part, EngineLinear) for part in model.modules()), "nothing stays below it"
    weights, ranges = [layer.mlp.up_proj.weight for layer in model.model.layers], [*mapped_ranges()]
    in_files = [any(part.start <= weight.data_ptr() < part.end for part in ranges) for weight in weights]
    assert all(in_files), "the weights that the invariant engine restored take memory"
    seat.remove()
    assert torch.equal(logits(model), expected["plain"]) and engine_forward(model) is None
    assert compilations.call_count == 1


def test_the_engine_below_is_used_again(seat: Seat, model: PreTrainedModel) -> None:
    seat.begin_trials(lambda: PLENTY)
    for name in ("openvino", "invariant", "openvino", "invariant"):
        assert seat.install(name, [1]) == ""
    expected = logits(model)
    assert seat.end_trials() == "" and seat.name == "invariant"
    assert torch.equal(logits(model), expected)
    openvino = seat.engines["openvino"]
    assert isinstance(openvino, ParkingEngine) and not openvino.is_parked()
    assert isinstance(model.lm_head, EngineLinear)


def test_without_memory_nothing_is_kept(seat: Seat, compilations: mock.Mock) -> None:
    seat.begin_trials(lambda: 0)
    assert seat.install("openvino", [1]) == ""
    for count in (2, 1):
        seat.engine.set_threads(count)
    assert compilations.call_count == 3
    assert seat.install("invariant", [1]) == "" and not seat.can_switch(["openvino"])
    assert seat.install("openvino", [1]) == "" and compilations.call_count == 4


def test_outside_trials_nothing_is_kept(seat: Seat) -> None:
    assert seat.install("openvino", [1]) == "" and seat.install("plain", []) == ""
    assert not seat.can_switch(["openvino"])
