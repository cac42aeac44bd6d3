"""Models with random weights in the sizes that people run, written tensor by tensor as safetensors or GGUF files.

Speed and memory do not depend on the values of weights, so nothing is downloaded but the embedded model's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tiny_gguf import add_sizes, add_tokens
from transformers import LlamaConfig

SAFETENSORS = "safetensors"
GGUF_FORMS = ("q8_0", "q4_0", "q4_k")
FORMS = (SAFETENSORS, *GGUF_FORMS)
SPREAD = 0.02  # standard deviation of the weights
LAYERS_PER_FILE = 8
CONTEXT = 8192
# The half-precision numbers at the start of each block, for values with the spread above and a mean near zero: the
# scale, and for Q4_K the scale of the minimums.
BLOCK_STARTS = {"q8_0": (SPREAD / 74,), "q4_0": (SPREAD / 4.6,), "q4_k": (SPREAD / 230, 7.5 * SPREAD / 230)}


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with tied embeddings. Its widths are multiples of 256, the block length of Q4_K."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    inner: int

    def config(self, vocabulary: int) -> LlamaConfig:
        """The configuration of transformers."""
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            dtype="bfloat16",
        )
        config.architectures = ["LlamaForCausalLM"]
        return config

    def weights(self, vocabulary: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
        """The names and shapes of the tensors: those outside the layers, then those of each layer."""
        hidden, inner, keys = self.hidden, self.inner, self.hidden // self.heads * self.key_heads
        yield [("model.embed_tokens.weight", (vocabulary, hidden)), ("model.norm.weight", (hidden,))]
        parts: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for layer in range(self.layers):
            yield [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in parts.items()]

    def count(self, vocabulary: int) -> tuple[int, int]:
        """The numbers of weights of the embeddings, which are the output head too, and of everything else."""
        outside, *layers = self.weights(vocabulary)
        head = vocabulary * self.hidden
        return head, sum(prod(size) for part in (outside, *layers) for _, size in part) - head

    def cache_bytes(self, tokens: int) -> int:
        """The keys and values of so many tokens in float32."""
        return 8 * tokens * self.layers * self.key_heads * (self.hidden // self.heads)


# By billions of parameters: those of the embedded model's family and of Llama 3, with widths that Q4_K can hold.
SHAPES = {
    0.02: Shape(4, 256, 4, 2, 768),
    0.05: Shape(8, 512, 8, 4, 1536),
    0.36: Shape(28, 1024, 16, 4, 2816),
    1.7: Shape(24, 2048, 32, 32, 8192),
    3.0: Shape(28, 3072, 24, 8, 8192),
    8.0: Shape(36, 4096, 32, 8, 14336),
}


def drafter_of(size: float) -> float:
    """The size of the drafter of a target: 0.36 where that is smaller, as people run it."""
    return 0.36 if size > 0.36 else 0.05 if size > 0.05 else 0.02


def write_model(folder: Path, shape: Shape, form: str, tokenizer: Any) -> Path:
    """Write a model into a new folder. Returns what `--target` takes: the folder, or the GGUF file in it."""
    folder.mkdir(parents=True)
    config = shape.config(len(tokenizer))
    if form != SAFETENSORS:
        return _write_gguf(folder / f"model-{form}.gguf", shape, tokenizer)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_safetensors(folder, shape, config.vocab_size)
    return folder


def _write_safetensors(folder: Path, shape: Shape, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(shape.hidden)
    groups = list(shape.weights(vocabulary))
    files: dict[str, str] = {}
    for start in range(0, len(groups), LAYERS_PER_FILE):
        name = f"model-{start:05d}.safetensors"
        tensors = {
            tensor: _random(size, generator)
            for part in groups[start : start + LAYERS_PER_FILE]
            for tensor, size in part
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _random(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, SPREAD, generator=generator)


def _write_gguf(path: Path, shape: Shape, tokenizer: Any) -> Path:
    form = path.stem.partition("-")[2]
    kind = gguf.GGMLQuantizationType[form.upper()]
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, shape.config(len(tokenizer)))
    add_tokens(writer, tokenizer, _merges(tokenizer))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    tensors = [tensor for part in shape.weights(len(tokenizer)) for tensor in part]
    for name, size in tensors:
        stored = kind if len(size) > 1 else gguf.GGMLQuantizationType.F32
        block, nbytes = gguf.GGML_QUANT_SIZES[stored]
        count = prod(size) // block * nbytes
        writer.add_tensor_info(
            names.get_name(name, try_suffixes=(".weight",)), size, np.dtype(np.float32), count, raw_dtype=stored
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks = partial(random_blocks, form=form, generator=np.random.default_rng(shape.hidden))
    for _, size in tensors:
        writer.write_tensor_data(blocks(size) if len(size) > 1 else np.ones(size, dtype=np.float32))
    writer.close()
    return path


def random_blocks(size: tuple[int, ...], form: str, generator: np.random.Generator) -> np.ndarray:
    """The bytes (rows, bytes of a row) of a weight of this size (rows, columns)."""
    length, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form.upper()]]
    rows, columns = size
    blocks = generator.integers(0, 256, (rows * columns // length, nbytes), dtype=np.uint8)
    start = np.array(BLOCK_STARTS[form], dtype=np.float16).view(np.uint8)
    blocks[:, : len(start)] = start
    return blocks.reshape(rows, -1)


def _merges(tokenizer: Any) -> list[str]:
    """The merges of a byte-pair tokenizer as a GGUF file stores them."""
    pairs = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in pairs]
