"""GGUF blocks: their weights have the bits that the gguf package and transformers compute."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf

from utils.models import gguf_model
from utils.models.checkpoints import load_model
from utils.models.gguf_model import UNPACKERS, BlockIndex, GgufBlocks, Stored, shared_reader, unpacked
from utils.models.memory import Placement
from utils.models.sources import locate

GROUPS = {kind: 16 if kind in ("Q2_K", "Q3_K", "Q6_K") else 32 for kind in UNPACKERS}


@pytest.mark.parametrize(("at_once", "wide"), [(1, 1), (1, 3), (1000, 3), (1 << 24, 3)])
@pytest.mark.parametrize("kind", UNPACKERS)
def test_every_block_has_the_bits_of_the_reference(
    kind: str, at_once: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bytes reach every field of a block, unlike weights that were quantized."""
    monkeypatch.setattr(gguf_model, "UNPACKED_BYTES", at_once)
    quantization = gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[quantization]
    assert UNPACKERS[kind][1] == size
    data = np.random.default_rng(0).integers(0, 256, (48, wide * size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        reference = torch.from_numpy(gguf.dequantize(data, quantization))
    data, reference = data[reference.isfinite().all(1)], reference[reference.isfinite().all(1)]
    assert len(data) > 8
    block = unpacked(kind, data)
    assert (block.shape, block.group) == ((len(data), wide * weights), GROUPS[kind])
    assert torch.equal(block.dense(), reference)
    assert int(block.values.max()) - int(block.values.min()) < 2**block.bits


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_file_are_the_weights_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    """The rows of q and k are in another order in the file."""
    model = tiny_llama(vocab_size=300, num_key_value_heads=2)
    path = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), kind=kind, parts=("_proj", "embed_tokens"))
    loaded = load_model(locate(str(path), print), "none", Placement("cpu", torch.float32, lambda line: None))
    blocks = GgufBlocks(path, loaded)
    linears = {name for name, part in loaded.named_modules() if isinstance(part, torch.nn.Linear)}
    assert blocks.keys() == linears - {"lm_head"} | {"model.embed_tokens"}
    for name, block in blocks.items():
        assert torch.equal(block.dense(), loaded.get_parameter(f"{name}.weight"))


def test_a_shared_reader_reads_what_a_reader_of_its_own_does(tmp_path: Path) -> None:
    paths = [tmp_path / "first.gguf", tmp_path / "second.gguf"]
    for path in paths:
        write_gguf(path, tiny_llama(vocab_size=300), tiny_tokenizer(), kind="Q8_0", parts=("_proj",))
    own, originals = gguf.GGUFReader(paths[0]), (gguf.GGUFReader, gguf.get_tensor_name_map)
    with pytest.raises(KeyError), shared_reader(paths[0]) as reader:
        assert gguf.GGUFReader(str(paths[0])) is reader
        assert gguf.GGUFReader(paths[1]) is not reader
        assert {name: field.contents() for name, field in reader.fields.items()} == {
            name: field.contents() for name, field in own.fields.items()
        }
        for tensor, same in zip(reader.tensors, own.tensors, strict=True):
            assert (tensor.name, tensor.tensor_type) == (same.name, same.tensor_type)
            assert np.array_equal(tensor.data, same.data)
        raise KeyError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == originals


@pytest.mark.parametrize("kind", UNPACKERS)
def test_halves_are_what_makes_a_weight_infinite(kind: str, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[quantization]
    data = np.random.default_rng(1).integers(0, 256, (400, size), dtype=np.uint8)
    (tmp_path / "file").write_bytes(b"header" + data.tobytes())
    blocks = object.__new__(GgufBlocks)
    blocks._path = tmp_path / "file"
    blocks.index = BlockIndex("llama", {"layer": Stored("blk", kind, 400, 6, data.size)})
    finite = torch.stack([half.isfinite().flatten() for _, half in blocks.numbers()]).all(0)
    with np.errstate(all="ignore"):
        reference = torch.from_numpy(gguf.dequantize(data, quantization)).isfinite().all(1)
    assert torch.equal(finite, reference) and not finite.all() and finite.any()
