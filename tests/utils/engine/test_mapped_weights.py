"""Weights in files: their values stay, and a file that was changed in memory only is not dropped."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_llama
from torch import nn

from utils.engine import openvino_engine
from utils.engine.invariant import InvariantEngine
from utils.engine.mapped_weights import mapped_ranges, release_weights
from utils.engine.openvino_support import unsupported
from utils.engine.weight_format import EngineWeights

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which memory is a file")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_released_weights_keep_their_values(dtype: torch.dtype, tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 33)).to(dtype)
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    release_weights([layers], tmp_path)
    release_weights([layers], tmp_path)  # which are in files already
    after = layers.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(tmp_path.iterdir())


def test_weights_stay_in_memory_if_files_cannot_be_written(tmp_path: Path) -> None:
    layer = nn.Linear(64, 4096)
    before, address = layer.weight.detach().clone(), layer.weight.data_ptr()
    release_weights([layer], tmp_path / "missing")
    assert torch.equal(layer.weight, before) and layer.weight.data_ptr() == address


@linux
def test_an_embedding_that_shares_its_weight_stays_in_memory() -> None:
    table, head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
    head.weight = table.weight
    address = table.weight.data_ptr()
    release_weights([nn.ModuleList([table, head])])
    assert table.weight.data_ptr() == head.weight.data_ptr() == address


@linux
@pytest.mark.parametrize("changed", [False, True])
def test_weights_of_a_checkpoint_that_is_mapped_already(changed: bool, tmp_path: Path) -> None:
    values = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    values.tofile(tmp_path / "weights")
    layer = nn.Linear(1024, 64, bias=False)
    mapped = torch.from_numpy(np.memmap(tmp_path / "weights", np.float32, "c", shape=values.shape))
    layer.weight = nn.Parameter(mapped, requires_grad=False)
    if changed:
        layer.weight[0, 0] = -1.0  # only in memory
    release_weights([layer], tmp_path)
    assert layer.weight[0, 0] == (-1.0 if changed else 0.0) and layer.weight[63, 1023] == values[63, 1023]
    files = [part.path for part in mapped_ranges() if part.start <= layer.weight.data_ptr() < part.end]
    assert (files == [str(tmp_path / "weights")]) is not changed


@pytest.mark.skipif(bool(unsupported("float32")) or sys.platform != "linux", reason="openvino cannot run here")
def test_memory_is_returned_after_the_weights_that_another_engine_restored_are_in_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator would otherwise keep what the restored weights of the embedded target took: 800 MB."""
    model, in_files = tiny_llama(), list[bool]()

    def count() -> None:
        ranges = [*mapped_ranges()]
        weights = [part.weight for part in model.modules() if isinstance(part, nn.Linear)]
        in_files.extend(any(part.start <= weight.data_ptr() < part.end for part in ranges) for weight in weights)

    before = InvariantEngine([model], [], EngineWeights())
    assert before.install([1]) == ""
    before.remove()
    monkeypatch.setattr(openvino_engine, "release_memory", count)
    engine = openvino_engine.OpenVinoEngine([model], [], EngineWeights())
    assert engine.install([1]) == ""
    assert len(in_files) > 10 and all(in_files)
    engine.remove()
