"""The weights of a GGUF file in their own blocks, so that engines can multiply with them instead of float32 copies.

A block's integers, scales and minimums become a BlockWeight whose `dense` gives the bits that transformers loads. Types
whose weights have another form are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGUFReader
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    read_field,
)

from utils.engine.weight_blocks import BlockWeight
from utils.errors import UserError
from utils.files import file_state, has_changed

CHANGED = "{} has changed since it was loaded: load the model again (/load)."
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
UNPACKED_BYTES = 1 << 24  # of a file that are unpacked at once


class Stored(NamedTuple):
    """A matrix of the file: where its blocks begin, and how many bytes they take."""

    name: str
    kind: str
    rows: int
    offset: int
    size: int


class _Blocks(NamedTuple):
    """Blocks of one type: values (B, weights of a block), scales and shifts (B, groups of a block)."""

    values: Tensor
    scales: Tensor
    shifts: Tensor | None
    bits: int
    offset: int = 0


class BlockIndex(NamedTuple):
    """The matrices of a file in the types of UNPACKERS, by the names of layers. `architecture` is as in the file."""

    architecture: str
    tensors: dict[str, Stored]


class GgufBlocks(Mapping[str, BlockWeight]):
    """The weights of a GGUF file, by the names of the layers of the model that transformers loads from it.

    Only matrices of the types in UNPACKERS are here. They are read from the file at each access, so that nothing is
    kept in memory. The layers of the model must not have been replaced yet. `origin` is the file and its state.
    """

    def __init__(self, path: Path, model: PreTrainedModel, index: BlockIndex | None = None) -> None:
        """Without a known `index` the file is read, which takes seconds for a large vocabulary."""
        self.index = index or block_index(GGUFReader(path), model)
        self.origin = file_state(path)
        self._path, self._processor = path, tensor_processor(self.index.architecture, model)

    def __getitem__(self, name: str) -> BlockWeight:
        """Raises UserError if the file has changed."""
        stored = self.index.tensors[name]
        if has_changed(self._path, self.origin):
            raise UserError(CHANGED.format(self._path))
        data = np.fromfile(self._path, np.uint8, stored.size, offset=stored.offset)
        block = unpacked(stored.kind, data.reshape(stored.rows, -1))
        return _in_model_order(block, stored.name, self._processor)

    def halves(self) -> Iterator[tuple[str, Tensor]]:
        """All float16 numbers of the file, with the names of their weights. A weight is finite if they are."""
        for name, stored in self.index.tensors.items():
            form = UNPACKERS[stored.kind]
            blocks = np.memmap(self._path, np.uint8, "r", stored.offset, (stored.size // form.size, form.size))
            for at in form.halves:
                yield name, torch.from_numpy(np.array(blocks[:, at : at + 2])).view(torch.float16)

    def bytes_of(self, name: str) -> float:
        """Return the bytes that an engine holds for each value of a weight, scales included. Raises KeyError."""
        return UNPACKERS[self.index.tensors[name].kind].held

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.tensors)

    def __len__(self) -> int:
        return len(self.index.tensors)


def block_index(reader: GGUFReader, model: PreTrainedModel) -> BlockIndex:
    """Find the matrices of a file that its model's layers hold. A tied head is found under its own name as well."""
    architecture = read_field(reader, "general.architecture")[0]
    names: dict[str, str] = get_gguf_hf_weights_map(model, tensor_processor(architecture, model))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if EMBEDDING in stored:
        stored.setdefault(HEAD, stored[EMBEDDING])
    matrices = ((name, tensor) for name, tensor in stored.items() if len(tensor.shape) == 2 and name in names)
    return BlockIndex(
        architecture,
        {
            names[name].removesuffix(".weight"): Stored(
                tensor.name,
                tensor.tensor_type.name,
                rows=int(tensor.shape[1]),
                offset=int(tensor.data_offset),
                size=int(tensor.n_bytes),
            )
            for name, tensor in matrices
            if tensor.tensor_type.name in UNPACKERS
        },
    )


class _Reader(GGUFReader):
    """A reader that slices a plain array, because slices of a memmap are slow to make."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


@contextmanager
def shared_reader(path: Path) -> Iterator[GGUFReader]:
    """Read the header of a file once. Transformers reads it for each of config, tokenizer and weights, and makes the
    table of tensor names for every module of a model, which takes many seconds for a large vocabulary.
    """
    reader, originals = _Reader(path), (gguf.GGUFReader, gguf.get_tensor_name_map)

    def read(other: str | Path, *arguments: Any) -> GGUFReader:
        return reader if os.path.samefile(other, path) else originals[0](other, *arguments)

    gguf.GGUFReader, gguf.get_tensor_name_map = read, cache(originals[1])
    try:
        yield reader
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = originals


def tensor_processor(architecture: str, model: PreTrainedModel) -> TensorProcessor:
    """Return what transformers does to the tensors of an architecture after it has unpacked them."""
    config, names = model.config.get_text_config(decoder=True), ("num_attention_heads", "num_key_value_heads")
    counts = {name: getattr(config, name, None) for name in names}
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=counts)


def unpacked(kind: str, data: np.ndarray) -> BlockWeight:
    """Return the weight of a tensor. `kind` is a name in UNPACKERS. `data` is (N, bytes of a row), uint8."""
    form = UNPACKERS[kind]
    # A few rows at a time, because unpacking needs several times the memory of its result.
    some = max(1, UNPACKED_BYTES // max(1, data.shape[1]))
    parts = [_unpacked_rows(form, data[start : start + some]) for start in range(0, len(data), some)]
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    shifts = None if parts[0].shifts is None else joined("shifts")
    return replace(parts[0], values=joined("values"), scales=joined("scales"), shifts=shifts)


def _unpacked_rows(form: _Type, data: np.ndarray) -> BlockWeight:
    rows = len(data)
    blocks = form.unpack(torch.from_numpy(data).view(-1, form.size))
    values = blocks.values.view(rows, -1)
    shifts = None if blocks.shifts is None else blocks.shifts.reshape(rows, -1)
    scales = blocks.scales.reshape(rows, -1)
    return BlockWeight(values, scales, shifts, values.shape[1] // scales.shape[1], blocks.bits, blocks.offset)


def _in_model_order(block: BlockWeight, name: str, processor: TensorProcessor) -> BlockWeight:
    """Reorder rows as transformers does: GGUF files of Llama keep rotary dimensions side by side, not in halves.

    Groups are along the columns, so each tensor is reordered in the same way.
    """

    def reordered(part: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(processor.process(part.numpy(), name=name).weights))

    shifts = None if block.shifts is None else reordered(block.shifts)
    return replace(block, values=reordered(block.values), scales=reordered(block.scales), shifts=shifts)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at a byte of every block (B, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _fields(data: Tensor, width: int, bits: int) -> Tensor:
    """Split bytes into fields of `bits` bits, the lowest of `width` bytes first: (B, n * width) -> (B, n * 8 // bits,
    width).
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return (data.reshape(len(data), -1, 1, width) >> shifts & (1 << bits) - 1).flatten(1, 2)


def _q4_0(blocks: Tensor) -> _Blocks:
    return _Blocks(_fields(blocks[:, 2:], 16, 4).flatten(1), _halves(blocks, 0), None, 4, offset=-8)


def _q4_1(blocks: Tensor) -> _Blocks:
    return _Blocks(_fields(blocks[:, 4:], 16, 4).flatten(1), _halves(blocks, 0), _halves(blocks, 2), 4)


def _q8_0(blocks: Tensor) -> _Blocks:
    return _Blocks(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0), None, 8)


def _q4_k(blocks: Tensor) -> _Blocks:
    return _Blocks(_fields(blocks[:, 16:], 32, 4).flatten(1), *_k_scales(blocks), 4)


def _q5_k(blocks: Tensor) -> _Blocks:
    low, high = _fields(blocks[:, 48:], 32, 4), _fields(blocks[:, 16:48], 32, 1)
    return _Blocks((low | high << 4).flatten(1), *_k_scales(blocks), 5)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums (B, 8) of Q4_K and Q5_K blocks: 6 bits each in 12 bytes, times two float16 numbers."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, both & 15 | first >> 6 << 4], dim=1)
    minimums = torch.cat([second & 63, both >> 4 | second >> 6 << 4], dim=1)
    return _halves(blocks, 0).float() * scales, -_halves(blocks, 2).float() * minimums


def _q6_k(blocks: Tensor) -> _Blocks:
    low, high = _fields(blocks[:, :128], 64, 4).reshape(-1, 8, 32), _fields(blocks[:, 128:192], 32, 2)
    scales = _halves(blocks, 208).float() * blocks[:, 192:208].contiguous().view(torch.int8)
    return _Blocks(((low | high << 4).view(torch.int8) - 32).flatten(1), scales, None, 6)


class _Type(NamedTuple):
    """A type of tensors. size: bytes of a block in the file. halves: where its float16 numbers begin. held: bytes for
    each weight in an engine.
    """

    unpack: Callable[[Tensor], _Blocks]
    size: int
    halves: tuple[int, ...]
    held: float


UNPACKERS = {
    "Q4_0": _Type(_q4_0, 18, (0,), 0.5625),
    "Q4_1": _Type(_q4_1, 20, (0, 2), 0.625),
    "Q8_0": _Type(_q8_0, 34, (0,), 1.0625),
    "Q4_K": _Type(_q4_k, 144, (0, 2), 0.75),
    "Q5_K": _Type(_q5_k, 176, (0, 2), 1.25),
    "Q6_K": _Type(_q6_k, 210, (208,), 1.25),
}
