"""GGUF blocks: their weights have the bits that the gguf package and transformers compute."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf

from utils.models.checkpoints import load_model
from utils.models.devices import Placement
from utils.models.gguf_blocks import UNPACKERS, GgufBlocks, unpacked
from utils.models.sources import locate

GROUPS = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}


@pytest.mark.parametrize("kind", UNPACKERS)
def test_every_block_has_the_bits_of_the_reference(kind: str) -> None:
    """Random bytes reach every field of a block, unlike weights that were quantized."""
    quantization = gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[quantization]
    assert UNPACKERS[kind][1] == size
    data = np.random.default_rng(0).integers(0, 256, (48, 3 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        reference = torch.from_numpy(gguf.dequantize(data, quantization))
    data, reference = data[reference.isfinite().all(1)], reference[reference.isfinite().all(1)]
    assert len(data) > 8
    block = unpacked(kind, data)
    assert (block.shape, block.group) == ((len(data), 3 * weights), GROUPS[kind])
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
