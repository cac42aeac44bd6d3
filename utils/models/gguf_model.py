"""GGUF files as models whose linear weights stay in the file until an engine reads them or multiplies with their
blocks. The `dense` of these has the bits that transformers loads.

The blocks of embedding and output head are in memory, and their rows are unpacked when they are read. Norms and biases
are unpacked once, into a cache folder with the tokenizer, the config and an index of the matrices. Models that no
engine packs and those of experts are left to transformers' loader, which unpacks the whole file at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import transformers
from gguf import GGUFReader, dequantize
from gguf.quants import IQ4_NL
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    read_field,
)

from utils.artifact_cache import build_folder, is_intact, remove_stale
from utils.engine.invariant import packing_problem
from utils.engine.read_decoder import read_decoder
from utils.engine.stored_weights import RowTable, TableRows, placeholder, with_placeholder
from utils.engine.weight_blocks import BlockWeight
from utils.errors import UserError
from utils.files import file_state, has_changed, user_folder
from utils.freed_memory import release_memory
from utils.models import counted_seconds
from utils.models.checkpoints import compared_layers, load_tokenizer, loads_alike
from utils.models.file_model import CHANGED, FORMATS, check_tensor, empty_model, finish, layer_linears
from utils.models.gguf_header import read_config
from utils.models.load_errors import explained_errors, quiet
from utils.models.memory import Placement, check_free, plan_memory
from utils.models.sources import Source
from utils.text import byte_size

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
UNPACKED_BYTES = 1 << 21  # of a file that are unpacked at once, so that they stay in the processor's cache


class Stored(NamedTuple):
    """A matrix of the file: where it begins, and how many bytes it takes."""

    name: str
    kind: str
    rows: int
    offset: int
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        count, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return self.rows, self.size // self.rows // nbytes * count


class BlockIndex(NamedTuple):
    """The matrices of a file, by the names of layers. `architecture` is as in the file."""

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
        if stored.kind not in UNPACKERS:
            raise KeyError(name)
        return unpacked(stored.kind, self.read(name)).map(partial(self._in_model_order, stored.name))

    def matrix(self, name: str) -> Tensor:
        """Return a weight of any type: in its number format, as a mapping of the file, or unpacked to float32. Raises
        UserError if the file has changed.
        """
        if name in self:
            return self[name].dense()
        stored = self.index.tensors[name]
        if (dtype := FORMATS.get(stored.kind)) is None:
            whole = torch.from_numpy(dequantize(self.read(name), gguf.GGMLQuantizationType[stored.kind]))
        else:
            self._check()
            # Numbers of 16 bits as integers, because NumPy has no bfloat16. Nothing is written back to the file.
            size = {4: np.float32, 2: np.int16}[dtype.itemsize]
            whole = torch.from_numpy(np.memmap(self._path, size, "c", stored.offset, stored.shape))
        whole = self._in_model_order(stored.name, whole)
        return whole if dtype is None else whole.view(dtype)

    def read(self, name: str) -> np.ndarray:
        """Return the blocks of a weight as they are in the file: (N, bytes of a row), uint8. Raises UserError if the
        file has changed.
        """
        self._check()
        stored = self.index.tensors[name]
        return np.fromfile(self._path, np.uint8, stored.size, offset=stored.offset).reshape(stored.rows, -1)

    def _check(self) -> None:
        if has_changed(self._path, self.origin):
            raise UserError(CHANGED.format(self._path))

    def _in_model_order(self, name: str, part: Tensor) -> Tensor:
        """Reorder rows as transformers does: GGUF files of Llama keep rotary dimensions side by side, not in halves.

        Groups of blocks are along the columns, so each of their tensors is reordered in the same way.
        """
        return torch.from_numpy(np.ascontiguousarray(self._processor.process(part.numpy(), name=name).weights))

    def numbers(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices with their names, or the float16 numbers of their blocks, which are finite if these are."""
        for name, stored in self.index.tensors.items():
            if (form := UNPACKERS.get(stored.kind)) is None:
                yield name, self.matrix(name)
                continue
            blocks = np.memmap(self._path, np.uint8, "r", stored.offset, (stored.size // form.size, form.size))
            for at in form.halves:
                yield name, torch.from_numpy(np.array(blocks[:, at : at + 2])).view(torch.float16)

    def bytes_of(self, name: str) -> float:
        """Return the bytes that an engine holds for each value of a weight, scales included. Raises KeyError."""
        return UNPACKERS[self.index.tensors[name].kind].held

    def __contains__(self, name: object) -> bool:
        return name in self.index.tensors and self.index.tensors[str(name)].kind in UNPACKERS

    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, self.index.tensors)

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
    some = max(1, UNPACKED_BYTES // max(1, data.shape[1]))
    first = _unpacked_rows(form, data[:1])  # no tensor of a file is empty
    whole = first.map(lambda part: part.new_empty(len(data), part.shape[1]))

    def unpack(start: int) -> None:
        own = slice(start, start + some)
        # Copied while it is in the processor's cache.
        whole.map(lambda out, part: out[own].copy_(part), _unpacked_rows(form, data[own]))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(unpack, range(0, len(data), some)))
    return whole


def _unpacked_rows(form: _Type, data: np.ndarray) -> BlockWeight:
    blocks = form.unpack(torch.from_numpy(data).view(-1, form.size))
    return blocks.map(lambda part: part.reshape(len(data), -1))


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at a byte of every block (B, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _fields(data: Tensor, width: int, bits: int) -> Tensor:
    """Split bytes into fields of `bits` bits, the lowest of `width` bytes first: (B, n * width) -> (B, n * 8 // bits,
    width). Four bytes are split at once, because PyTorch shifts single bytes slowly.
    """
    aligned = data.clone(memory_format=torch.contiguous_format)  # a single block may begin between two words
    words = aligned.view(torch.int32).unflatten(1, (-1, width // 4))
    lowest = int.from_bytes([(1 << bits) - 1] * 4)  # of each byte
    fields = [words >> shift & lowest for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=2).flatten(1, 2).view(torch.uint8)


def _q4_0(blocks: Tensor) -> BlockWeight:
    return BlockWeight(_fields(blocks[:, 2:], 16, 4).flatten(1), _halves(blocks, 0), None, 32, bits=4, offset=-8)


def _q4_1(blocks: Tensor) -> BlockWeight:
    return BlockWeight(_fields(blocks[:, 4:], 16, 4).flatten(1), _halves(blocks, 0), _halves(blocks, 2), 32, bits=4)


def _q5_0(blocks: Tensor) -> BlockWeight:
    return BlockWeight(_five_bits(blocks[:, 2:]).view(torch.int8) - 16, _halves(blocks, 0), None, 32, bits=5)


def _q5_1(blocks: Tensor) -> BlockWeight:
    return BlockWeight(_five_bits(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2), 32, bits=5)


def _five_bits(data: Tensor) -> Tensor:
    """Return the values (B, 32) of four bytes with their highest bits and 16 with the others."""
    high = _fields(data[:, :4], 4, 1).transpose(1, 2)  # the eight bits of a byte belong to adjacent values
    return _fields(data[:, 4:], 16, 4).flatten(1) | high.flatten(1) << 4


def _q8_0(blocks: Tensor) -> BlockWeight:
    return BlockWeight(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0), None, 32, bits=8)


def _q2_k(blocks: Tensor) -> BlockWeight:
    factors = torch.cat([_halves(blocks, 80), -_halves(blocks, 82)], dim=1).float()
    scales, minimums = _fields(blocks[:, :16], 16, 4).unbind(1)
    return BlockWeight(_fields(blocks[:, 16:80], 32, 2).flatten(1), scales, minimums, 16, bits=2, factors=factors)


def _q3_k(blocks: Tensor) -> BlockWeight:
    values = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << 2
    low, high = _fields(blocks[:, 96:104], 8, 4), _fields(blocks[:, 104:108], 4, 2)
    scales = (low.flatten(1) | high.flatten(1) << 4).view(torch.int8) - 32
    return BlockWeight(values.flatten(1), scales, None, 16, bits=3, offset=-4, factors=_halves(blocks, 108).float())


def _q4_k(blocks: Tensor) -> BlockWeight:
    scales, minimums, factors = _k_scales(blocks)
    return BlockWeight(_fields(blocks[:, 16:], 32, 4).flatten(1), scales, minimums, 32, bits=4, factors=factors)


def _q5_k(blocks: Tensor) -> BlockWeight:
    low, high = _fields(blocks[:, 48:], 32, 4), _fields(blocks[:, 16:48], 32, 1)
    scales, minimums, factors = _k_scales(blocks)
    return BlockWeight((low | high << 4).flatten(1), scales, minimums, 32, bits=5, factors=factors)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales and minimums (B, 8) of Q4_K and Q5_K blocks, 6 bits each in 12 bytes, and the two float16 numbers
    (B, 2) that they are multiplied with.
    """
    first, second, both = blocks[:, 4:16].contiguous().view(torch.int32).split(1, dim=1)  # of four scales each
    low, six, top = 0x0F0F0F0F, 0x3F3F3F3F, 0x30303030  # bits of each byte
    scales = torch.cat([first & six, both & low | first >> 2 & top], dim=1).view(torch.uint8)
    minimums = torch.cat([second & six, both >> 4 & low | second >> 2 & top], dim=1).view(torch.uint8)
    return scales, minimums, torch.cat([_halves(blocks, 0), -_halves(blocks, 2)], dim=1).float()


def _q6_k(blocks: Tensor) -> BlockWeight:
    low, high = _fields(blocks[:, :128], 64, 4).reshape(-1, 8, 32), _fields(blocks[:, 128:192], 32, 2)
    values, scales = (low | high << 4).view(torch.int8) - 32, blocks[:, 192:208].contiguous().view(torch.int8)
    return BlockWeight(values.flatten(1), scales, None, 16, bits=6, factors=_halves(blocks, 208).float())


def _iq4_nl(blocks: Tensor) -> BlockWeight:
    return BlockWeight(_from_table(blocks[:, 2:]), _halves(blocks, 0), None, 32, bits=8)


def _iq4_xs(blocks: Tensor) -> BlockWeight:
    low, high = (  # of the scales of adjacent groups
        torch.stack([data >> shift & lowest for shift in shifts], dim=2).flatten(1)
        for data, shifts, lowest in ((blocks[:, 4:8], (0, 4), 15), (blocks[:, 2:4], (0, 2, 4, 6), 3))
    )
    scales = (low | high << 4).view(torch.int8) - 32
    return BlockWeight(_from_table(blocks[:, 8:]), scales, None, 32, bits=8, factors=_halves(blocks, 0).float())


def _from_table(data: Tensor) -> Tensor:
    """Return the values of fields of 4 bits, which are places in the table of IQ4_NL and IQ4_XS."""
    return torch.tensor(IQ4_NL.kvalues, dtype=torch.int8)[_fields(data, 16, 4).flatten(1).int()]


class _Type(NamedTuple):
    """A type of tensors. unpack: its blocks (B, size) as weights (B, weights of a block). size: bytes of a block in the
    file. halves: where its float16 numbers begin. held: bytes for each weight in an engine.
    """

    unpack: Callable[[Tensor], BlockWeight]
    size: int
    halves: tuple[int, ...]
    held: float


UNPACKERS = {
    "Q4_0": _Type(_q4_0, 18, (0,), 0.5625),
    "Q4_1": _Type(_q4_1, 20, (0, 2), 0.625),
    "Q5_0": _Type(_q5_0, 22, (0,), 1.0625),
    "Q5_1": _Type(_q5_1, 24, (0, 2), 1.125),
    "Q8_0": _Type(_q8_0, 34, (0,), 1.0625),
    "Q2_K": _Type(_q2_k, 84, (80, 82), 0.65625),
    "Q3_K": _Type(_q3_k, 110, (108,), 0.578125),
    "Q4_K": _Type(_q4_k, 144, (0, 2), 0.59375),
    "Q5_K": _Type(_q5_k, 176, (0, 2), 1.09375),
    "Q6_K": _Type(_q6_k, 210, (208,), 1.078125),
    "IQ4_NL": _Type(_iq4_nl, 18, (0,), 1.0625),
    "IQ4_XS": _Type(_iq4_xs, 136, (0,), 1.046875),
}


INDEX, DENSE = "blocks.json", "model.safetensors"
HEAD_LAYER, EMBEDDING_LAYER = "lm_head", "model.embed_tokens"
RECIPE = 5  # increase it whenever `_unpack` writes something else, so that older entries are rebuilt


class FileMatrix(NamedTuple):
    """A `WeightSource` in a GGUF file."""

    blocks: GgufBlocks
    name: str

    @property
    def itemsize(self) -> int:
        return FORMATS.get(self._kind, torch.float32).itemsize

    @property
    def _kind(self) -> str:
        return self.blocks.index.tensors[self.name].kind

    def read(self) -> Tensor:
        return self.stored().to(torch.float32, copy=self._kind in FORMATS)  # a copy of what is mapped

    def stored(self) -> Tensor:
        return self.blocks.matrix(self.name)


class BlockRows:
    """A `RowSource` in a GGUF file, not of a type in FORMATS. Its blocks are in memory, because files change."""

    itemsize, dtype = torch.float32.itemsize, torch.float32

    def __init__(self, blocks: GgufBlocks, name: str) -> None:
        self.blocks, self.name = blocks, name
        stored = blocks.index.tensors[name]
        self.held = torch.from_numpy(blocks.read(name))  # (N, bytes of a row)
        self.shape, self._kind = torch.Size(stored.shape), gguf.GGMLQuantizationType[stored.kind]
        self.filled: Callable[[], Tensor | None] = lambda: None

    def rows(self, ids: Tensor) -> Tensor:
        data = self.held.index_select(0, ids.flatten()).numpy()  # gguf is faster for a few rows, with the same numbers
        return torch.from_numpy(dequantize(data, self._kind)).view(*ids.shape, self.shape[1])

    def part(self, take: Callable[[Tensor], Tensor], *, of_rows: bool) -> Tensor:
        return self.rows(take(torch.arange(len(self.held)))) if of_rows else take(self.read())

    def read(self) -> Tensor:
        filled = self.filled()
        return self.blocks.matrix(self.name) if filled is None else filled.detach()

    def stored(self) -> Tensor:
        return self.read()


# A model whose linear weights are in a file, its tokenizer and these weights.
InBlocks = tuple[PreTrainedModel, PreTrainedTokenizerBase, GgufBlocks]


def load_in_blocks(source: Source, where: Placement) -> InBlocks | str:
    """Load a GGUF file on the CPU, in float32.

    Returns a clause that says why it must be unpacked, if it must. Raises UserError if the file cannot be loaded, or if
    its parts do not fit into memory or on the disk.
    """
    path = Path(source.location, str(source.gguf))
    with explained_errors(source.name), quiet():
        folder, made_from = cache_entry(path)
        if not is_intact(folder, made_from):
            with shared_reader(path) as reader:
                if reason := _prepare(source, reader, folder, made_from, where=where):
                    return reason
            release_memory()
        loaded, size = _loaded(source.name, path, folder), path.stat().st_size
        if where.engine_weights == "gguf":
            remedy = "use a smaller model, or a file with fewer bits per weight"
            check_free(source.name, size + (folder / DENSE).stat().st_size, where.device, remedy)
        else:
            kinds = {f"{name}.weight": stored.kind for name, stored in loaded[2].index.tensors.items()}
            counts = Counter[str]()
            for name, part in loaded[0].named_parameters():
                counts[kinds[name] if kinds.get(name) in FORMATS else "F32"] += part.numel()
            plan_memory(replace(source, weight_counts=counts), "none", where, in_files=True)
        where.report(f"loading {source.name} (cpu, from the GGUF file, {byte_size(size)}) ...")
        return loaded


def _prepare(source: Source, reader: GGUFReader, folder: Path, made_from: str, *, where: Placement) -> str | None:
    """Write what `_loaded` reads. Returns a reason as `load_in_blocks` does. Raises UserError."""
    model = empty_model(read_config(source), torch.float32)
    if isinstance(reason := read_decoder(model), str) and (packing_problem(model) or not _has_known_matrices(model)):
        return reason
    where.report(f"preparing {source.name} (once, cached in {folder.parent.parent}) ...")
    what, progress = f"What is prepared of '{source.name}'", counted_seconds(where.report, f"preparing {source.name}")
    try:
        with build_folder(folder, made_from, what) as made, progress:
            made.mkdir()
            _unpack(source, reader, made, model)
            load_tokenizer(source).save_pretrained(made)
            if isinstance(reason, str) and not _is_alike(source, reader, made):
                raise NotImplementedError
    except NotImplementedError:  # nothing is kept: memory may have been too small for the comparison
        return str(reason)
    return None


def _is_alike(source: Source, reader: GGUFReader, folder: Path) -> bool:
    """Whether transformers loads the same first layers. The reader has no other ones afterwards."""
    model = _loaded(source.name, Path(source.location, str(source.gguf)), folder)[0]
    later = tuple(f"blk.{layer}." for layer in range(compared_layers(model), model.config.num_hidden_layers))
    reader.tensors = [tensor for tensor in reader.tensors if not tensor.name.startswith(later)]
    return loads_alike(model, source)


def _has_known_matrices(model: PreTrainedModel) -> bool:
    """Whether all matrices are those of linear layers, the embedding and the output head."""
    known = {f"{name}.weight" for name in (*layer_linears(model), HEAD_LAYER, EMBEDDING_LAYER)}
    return all(name in known for name, part in model.named_parameters() if part.dim() > 1)


def _loaded(name: str, path: Path, folder: Path) -> InBlocks:
    """Load from a prepared folder."""
    stored = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    index = BlockIndex(stored["architecture"], {layer: Stored(*row) for layer, row in stored["tensors"].items()})
    model = empty_model(AutoConfig.from_pretrained(folder), torch.float32)
    blocks = GgufBlocks(path, model, index)
    with safe_open(folder / DENSE, framework="pt") as file:  # pages of the file are read when they are needed
        names = list(file.keys())  # the file is not iterable
        _set_weights(model, {name: file.get_tensor(name) for name in names}, blocks)
    finish(model, name, folder)
    return model, load_tokenizer(Source(str(folder), name)), blocks


def _unpack(source: Source, reader: GGUFReader, folder: Path, model: PreTrainedModel) -> None:
    """Write everything but the tokenizer. Raises UserError if weights are missing or not finite."""
    path, index = Path(source.location, str(source.gguf)), block_index(reader, model)
    for name, stored in index.tensors.items():
        if stored.shape != (expected := tuple(model.get_parameter(f"{name}.weight").shape)):
            raise UserError(
                f"'{source.name}' stores {name} in the shape {stored.shape}, but transformers expects {expected} from "
                "its header: use the safetensors files of this model."
            )
    dense = _dense_tensors(reader, model, index)
    blocks = GgufBlocks(path, model, index)
    for name, tensor in chain(dense.items(), blocks.numbers()):  # one matrix at a time
        check_tensor(tensor, source.name, name)
    if missing := _set_weights(model, dense, blocks):
        raise UserError(f"'{source.name}' lacks {len(missing)} of its weights ({missing[0]}, ...): fetch it again.")
    save_file(dense, folder / DENSE, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index._asdict()), encoding="utf-8")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _dense_tensors(reader: GGUFReader, model: PreTrainedModel, index: BlockIndex) -> dict[str, Tensor]:
    """The weights that are not matrices, as transformers unpacks them, in float32."""
    processor = tensor_processor(index.architecture, model)
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    held = {*_layers_in_blocks(model, index), *index.tensors.keys() & {HEAD_LAYER, EMBEDDING_LAYER}}
    dense = {}
    for tensor in reader.tensors:
        if names.get(tensor.name, "").removesuffix(".weight") in held:
            continue
        made = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": {}},
        )
        if made.name in names:
            dense[names[made.name]] = torch.from_numpy(np.require(made.weights, requirements=("C", "W"))).float()
    return dense


def _layers_in_blocks(model: PreTrainedModel, index: BlockIndex) -> dict[str, nn.Linear]:
    """The linear layers that hold no data, without the output head."""
    return {name: part for name, part in layer_linears(model).items() if name in index.tensors}


def _set_weights(model: PreTrainedModel, dense: Mapping[str, Tensor], blocks: GgufBlocks) -> list[str]:
    """Give a model its tensors, and placeholders or tables of rows for those in blocks. Returns the names of other
    parameters.
    """
    for name, layer in _layers_in_blocks(model, blocks.index).items():
        layer.weight = placeholder(layer.weight, FileMatrix(blocks, name))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    for part, name in ((embedding, HEAD_LAYER if is_tied else EMBEDDING_LAYER), (head, HEAD_LAYER)):
        if name in blocks.index.tensors and not (is_tied and part is head):
            part.weight = _table(blocks, name, is_head=part is head)
    for name, tensor in dense.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    model.tie_weights()
    found = dense.keys() | {f"{name}.weight" for name in blocks.index.tensors}
    return [name for name, _ in model.named_parameters() if name not in found]


def _table(blocks: GgufBlocks, name: str, *, is_head: bool) -> nn.Parameter:
    """The weight of an embedding, or of an output head that is not tied."""
    matrix = FileMatrix(blocks, name)
    if blocks.index.tensors[name].kind not in FORMATS:
        return nn.Parameter(RowTable(BlockRows(blocks, name)), requires_grad=False)
    if is_head:
        return with_placeholder(matrix.read(), matrix)
    return nn.Parameter(RowTable(TableRows(matrix, torch.float32)), requires_grad=False)


def cache_entry(path: Path) -> tuple[Path, str]:
    """Return the folder of a file's cache entry and the origin that it must have.

    Removes entries of older contents, and the remains of killed runs.
    """
    state = file_state(path)
    file_key, state_key = (
        # File names need not be valid UTF-8.
        hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
        for text in (str(path.resolve()), state)
    )
    root = user_folder("cache") / "gguf"
    remove_stale(root)
    for old in root.glob(f"{file_key}-*"):
        # Folders with .new- may belong to a process that is converting the file now.
        if not old.name.startswith(f"{file_key}-{state_key}-") and ".new-" not in old.name:
            shutil.rmtree(old, ignore_errors=True)
    name = f"{file_key}-{state_key}-{transformers.__version__}"
    return root / name, f"{state}, {transformers.__version__}, recipe {RECIPE}"
