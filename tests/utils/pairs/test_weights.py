"""The weights of a pair: their size in memory, notes on texts and speed, and default formats."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from shelf import load, write_wide_gguf
from tiny import save_folder, tiny_llama, tiny_tokenizer
from torch import nn

from utils.bounds import QUANTIZATIONS
from utils.decode.engine_forward import engine_forward
from utils.engine import compiled_products
from utils.engine.module_swap import EngineLinear
from utils.engine.weight_format import tensor_bytes
from utils.pairs import pair as pairs
from utils.text import byte_size

IDS = torch.tensor([[5, 9, 33, 12, 7, 41]])
QUANTIZED = tuple(kind for kind in QUANTIZATIONS if kind != "none")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("int8", "nf4") else pytest.mark.full) for kind in QUANTIZED]
)
def test_memory_is_that_of_the_quantization(wide: Path, kind: str) -> None:
    """Packed weights and their scales: the full weights are neither kept nor mapped."""
    pair = load(wide, "layers:1", quantize=kind)
    target, full = pair.target, load(wide, "layers:1").target
    linear = sum(
        part.weight.numel() for name, part in full.named_modules() if type(part) is nn.Linear and name != "lm_head"
    )
    rest = sum(part.nbytes for part in (*full.parameters(), *full.buffers())) - 4 * linear
    packed = linear if "8" in kind else linear // 2
    assert packed + rest < pair.memory < 1.3 * packed + rest + 2000 and pair.drafter_memory == 0
    held = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for part in target.parameters()
        if type(part) is nn.Parameter
    }
    assert sum(held.values()) <= rest


def storages() -> dict[int, int]:
    """Bytes of the memory of every living plain tensor, by address."""
    gc.collect()
    alive = [
        thing
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu"
    ]
    return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes() for thing in alive}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *(("folder", kind) for kind in ("none", "int8")),
        ("gguf", "none"),
        *(pytest.param("folder", kind, marks=pytest.mark.full) for kind in QUANTIZED if kind != "int8"),
        pytest.param("gguf", "int8", marks=pytest.mark.full),
    ],
)
def test_no_other_tensors_stay_alive(wide: Path, tmp_path: Path, own_cache: Path, kind: str, form: str) -> None:
    path = wide if form == "folder" else write_wide_gguf(tmp_path / "tiny.gguf")
    load(path, "layers:1", quantize=kind)  # from now on libraries hold what they never release
    before = storages()
    pair = load(path, "layers:1", quantize=kind)
    pair.target(IDS)
    grown = sum(size for address, size in storages().items() if address not in before)
    assert grown <= pair.memory * 1.05 + 10_000  # the header of a file, and state of bitsandbytes


@pytest.mark.parametrize("drafter", ["layers:1", pytest.param(None, marks=pytest.mark.full)])
def test_memory_is_that_of_the_kernels_that_replaced_the_weights(
    wide: Path, drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are those of the living tensors, before and after the engine packs them, and back."""
    alone = SimpleNamespace(empty=lambda shape, dtype: torch.empty(shape, dtype=dtype))  # each with its own memory
    monkeypatch.setattr(compiled_products, "_LARGE_PAGES", alone)
    load(wide, drafter).engine.use("invariant", 1)  # from now on libraries hold what they never release
    before = storages()
    pair = load(wide, drafter, engine_weights="int8")
    full = sum(part.nbytes for part in (*pair.target.parameters(), *pair.target.buffers()))
    assert byte_size(full) not in pairs.loaded_message(pair), "the size before rounding is not that of the run"
    pair.engine.use("invariant", 1)
    linear = sum(part.weight.numel() for part in pair.target.modules() if isinstance(part, EngineLinear))
    packed_head = pair.target.lm_head.weight.numel() if isinstance(pair.target.lm_head, EngineLinear) else 0
    assert pair.memory < full - 2 * (linear - packed_head)
    forwards = [*filter(None, map(engine_forward, filter(None, (pair.target, pair.drafter))))]
    for forward in forwards:
        forward._programs.clear()
        forward._buffers = None
    for part in pair.target.modules():
        if isinstance(part, EngineLinear):
            part.kernel._calls.clear()
    grown = sum(size for address, size in storages().items() if address not in before)
    tables = sum(forward.rotary.rows(0, 1).untyped_storage().nbytes() for forward in forwards)
    assert pair.memory == pytest.approx(grown - tables, rel=0.02, abs=5_000)
    assert byte_size(pair.memory) in pairs.describe_target(pair) and not pair.drafter_memory


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list mapped files")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.full if kind in ("int4", "bnb-int8") else ()) for kind in QUANTIZATIONS],
)
def test_no_file_of_weights_stays_mapped(tmp_path: Path, kind: str) -> None:
    path = save_folder(tmp_path / "mapped", tiny_llama(vocab_size=300, hidden_size=64), tiny_tokenizer())
    with safe_open(path / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor("model.norm.weight")
        assert str(path) in Path("/proc/self/maps").read_text()  # otherwise this test could not fail
    del file, tensor
    pair = load(path, "layers:1", quantize=kind)
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text() and pair.memory


def test_shared_memory_counts_once(tmp_path: Path) -> None:
    tied = save_folder(tmp_path / "tied", tiny_llama(vocab_size=300, tie_word_embeddings=True), tiny_tokenizer())
    pair = load(tied, tied)
    assert (
        pair.memory
        == pair.drafter_memory
        == sum(part.nbytes for part in (*pair.target.parameters(), *pair.target.buffers()))
    )
    assert tensor_bytes([pair.target], besides=[pair.target], in_files=True) == 0


def test_notes_on_texts(wide: Path) -> None:
    def has_note(about: str = "/audit", **words: str) -> bool:
        return any(about in note for note in load(wide, wide, **words).notes)

    assert has_note(quantize="bnb-int8")
    assert has_note("--engine-weights", quantize="int8") and not has_note("--engine-weights")
    assert not has_note(dtype="bfloat16") and not has_note(quantize="int8", drafter_quantize="bnb-int8")


def test_only_bnb_int8_depends_on_the_verify_width_by_more_than_rounding(wide: Path) -> None:
    """With the other formats, logits computed alone and in a verify pass differ only by the rounding of float32."""
    differences = {}
    for kind in QUANTIZED:
        target = load(wide, "layers:1", quantize=kind).target
        with torch.no_grad():
            differences[kind] = (target(input_ids=IDS[:, :1]).logits[0, 0] - target(IDS).logits[0, 0]).abs().max()
    assert max(differences[kind] for kind in ("int8", "int4", "nf4")) < 1e-4 < 1e-2 < differences["bnb-int8"]
