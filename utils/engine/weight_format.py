"""The number format in which engines compute linear weights, and the memory that weights need in each format."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.decode.model_info import cache_bytes
from utils.engine.module_swap import EngineLinear
from utils.engine.stored_weights import RowsOf, TableRows, data, origin_of, source_of, stored_data
from utils.engine.weight_blocks import INT4_GROUP, BlockWeight, round_int4, round_int8
from utils.text import byte_size

NOT_POSSIBLE = "{} engine weights are not possible: {}. Omit --engine-weights."
TRIED_ROWS = 64  # of a weight that may be on a grid of 4 bits


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """What --engine-weights asks for.

    format: "float32" (weights as they were loaded), "bfloat16", "int8", "int4" or "gguf". blocks: for "gguf", weights
    of the target by the names of its layers, such as "model.layers.0.mlp.up_proj". drafter_blocks: the same of a
    drafter from a GGUF file of its own.
    """

    format: str = "float32"
    blocks: Mapping[str, BlockWeight] | None = None
    drafter_blocks: Mapping[str, BlockWeight] | None = None

    @property
    def as_loaded(self) -> bool:
        """Whether weights are computed in the format in which they were loaded. Any other rounds them for good."""
        return self.format == "float32"

    def for_drafter(self) -> "EngineWeights":
        """Return the format of a drafter with weights of its own: int8 if its file has no blocks."""
        if self.format != "gguf":
            return self
        return EngineWeights("int8" if self.drafter_blocks is None else "gguf", self.drafter_blocks)

    def for_draft_head(self) -> "EngineWeights":
        """Return the format of a drafter that reads hidden states: 8 bits, or 4 for int4.

        A draft takes as long as its weights take to be read. Rounding them cannot change the target's text.
        """
        return self if self.format in ("int8", "int4") else EngineWeights("int8")

    def form(self, name: str, weight: Tensor, *, is_head: bool) -> Tensor | BlockWeight:
        """Return a weight (N, K) as it is computed in this format. It is read if it is in a file, and weights that are
        computed in float32 may be in another format that holds the same values.

        name: of the layer; a part of a fused parameter has its row range appended, as in "qkv_proj[0:64]".
        """
        if self.format == "gguf":
            shipped = self._shipped(name, weight)
            return data(weight) if shipped is None else shipped
        loaded = stored_data(weight)
        if self.format == "int8" or (self.format == "int4" and (is_head or loaded.shape[1] % INT4_GROUP)):
            return round_int8(loaded)  # the output head decides the tokens, so it keeps 8 bits
        if self.format == "int4":
            return round_int8(loaded) if _needs_8_bits(name, loaded) else round_int4(loaded)
        return loaded.bfloat16() if self.format == "bfloat16" else loaded

    def rounded(self, name: str, weight: Tensor, *, is_head: bool) -> Tensor:
        """Return the values of `form` as a tensor in the format in which the weight was loaded."""
        form = self.form(name, weight, is_head=is_head)
        return form.dense() if isinstance(form, BlockWeight) else form.to(weight.dtype)

    def _shipped(self, name: str, weight: Tensor) -> BlockWeight | None:
        """The blocks of a file, or None for a weight that is not stored in blocks."""
        layer, _, part = name.partition("[")
        source = origin_of(weight)
        layer = layer if source is None else source.name  # cut models have other names
        own = getattr(source.source if isinstance(source, RowsOf) else source, "blocks", None)
        block = ((self.blocks if own is None else own) or {}).get(layer)
        if block is not None and part:
            start, end = map(int, part.rstrip("]").split(":"))
            block = block.rows(start, end)
        # Columns may have been reordered as the file was read.
        is_other = block is None or (own is None and not torch.equal(block.dense(), data(weight)))
        return None if is_other else block


def _needs_8_bits(name: str, weight: Tensor) -> bool:
    """Whether int4 keeps a weight in 8 bits: the last of an MLP, whose rounding changes texts most.

    Weights on a grid of 4 bits stay there, because 8 bits would change them more. A few rows show which they are.
    """
    if not name.endswith("down_proj"):
        return False
    rows = weight[:: -(-len(weight) // TRIED_ROWS)]
    errors = [(rounded.dense() - rows).square().sum() for rounded in (round_int4(rows), round_int8(rows))]
    return bool(errors[1] < errors[0])


LONG, LONG_BYTES = 4096, 1 << 28  # tokens of the longer text of `forward_timing`, and its keys and values at most
CONTEXT = 1024  # tokens of a typical run; longer prompts are compared with the free memory when they come
BUFFERS = 200_000_000  # bytes of activations, logits and compiled code
# Bytes of a weight with its share of scales and shifts, as engines hold it. Blocks of GGUF files differ in size.
BYTES = {"bfloat16": 2.0, "int8": 1.01, "int4": 0.625, "gguf": 0.75}
EIGHT_BITS = ("down_proj", "lm_head")  # weights that int4 keeps in 8 bits
BITSANDBYTES_SCALES = ("absmax", "code", "SCB")


def weight_format(model: PreTrainedModel) -> str:
    """Return the number format of a model's weights as loaded: "float32", "bfloat16", ... or "quantized"."""
    dtype = next(model.parameters()).dtype
    return "quantized" if getattr(model, "is_quantized", False) else str(dtype).removeprefix("torch.")


def tensor_bytes(parts: Iterable[nn.Module], *, besides: Iterable[nn.Module] = (), in_files: bool = False) -> int:
    """Return the bytes of all parameters, buffers, kernels and scales, except those of `besides`. Shared memory counts
    once. in_files: with the weights that are only in files, as large as there.
    """
    excluded = _sizes(besides)
    return sum(size for place, size in _sizes(parts).items() if place not in excluded and (in_files or place[0]))


def _sizes(parts: Iterable[nn.Module]) -> dict[tuple[str, int], int]:
    """Bytes of tensors by device and address, without a device for those that are only in files."""
    sizes: dict[tuple[str, int], int] = {}
    modules = (module for part in parts for module in part.modules())
    for tensor in (plain for module in modules for held in _tensors(module) for plain in _plain(held)):
        if tensor.is_meta:
            source = source_of(tensor)
            sizes["", id(tensor)] = 0 if source is None else tensor.numel() * source.itemsize
            continue
        # The address is 0 where accelerate keeps the data elsewhere until it is used.
        key = (str(tensor.device), tensor.data_ptr() or id(tensor))
        # Tensors at one address may be views of different lengths.
        sizes[key] = max(tensor.nbytes, sizes.get(key, 0))
    return sizes


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
    if isinstance(module, EngineLinear):
        yield from module.kernel.tensors()  # also what a placeholder stands for
        yield from (tensor for tensor in module.original if tensor is not None and not tensor.is_meta)
    # bitsandbytes keeps scales in objects of its own.
    for state in (getattr(module._parameters.get("weight"), "quant_state", None), getattr(module, "state", None)):
        scales = (getattr(state, name, None) for name in BITSANDBYTES_SCALES)
        yield from (scale for scale in scales if isinstance(scale, Tensor))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or the parts of a composed one: data and scales."""
    # PyTorch's protocol of tensor subclasses: the names of the attributes that hold the inner tensors come first.
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from _plain(part)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The weight of a linear layer. nbytes: as loaded. stored: in the number format of its file. is_held: in memory.
    is_tied: also an embedding. joins: an embedding gives its rows up if the weight keeps its format. in_blocks: of a
    GGUF file. is_drafter: of a drafter with weights of its own.
    """

    name: str
    count: int
    nbytes: int
    stored: int
    is_held: bool
    is_tied: bool
    joins: bool
    in_blocks: bool
    is_drafter: bool


def placeholder_bytes(models: Sequence[PreTrainedModel]) -> int:
    """Return the bytes that weights in files take once they are read."""
    return sum(matrix.nbytes for matrix in _matrices(models) if not matrix.is_held)


def decoder_bytes(models: Sequence[PreTrainedModel], weights: EngineWeights) -> int:
    """Return the bytes of all linear weights in an engine's format. Weights that models share count once."""
    return sum(_bytes(matrix, weights) for matrix in _matrices(models))


def freed_bytes(models: Sequence[PreTrainedModel], weights: EngineWeights) -> int:
    """Return the bytes in memory that packing frees: linear weights that no embedding needs, and the rows of embeddings
    that join a packed head.
    """
    matrices = _matrices(models)
    joined = sum(matrix.stored for matrix in matrices if matrix.joins and weights.as_loaded)
    return joined + sum(matrix.nbytes for matrix in matrices if matrix.is_held and not matrix.is_tied)


def memory_problem(models: Sequence[PreTrainedModel], need: int, available: int, weights: EngineWeights) -> str:
    """Say that an engine does not fit into memory, if it does not. need: bytes of its weights."""
    total = need + _working_bytes(models, weights)
    if models[0].device.type != "cpu" or total <= available:
        return ""
    return f"it needs {byte_size(total)} of memory, and {byte_size(available)} are available"


def smaller_form(models: Sequence[PreTrainedModel], available: int) -> str:
    """A sentence that names number formats in which the models would fit."""
    blocks = [_blocks_of(model) for model in models]
    known = [EngineWeights("gguf", blocks[0], blocks[-1]), EngineWeights("int8"), EngineWeights("int4")]
    known = known if blocks[0] is not None else known[1:]
    needs = {
        f"--engine-weights {one.format}": decoder_bytes(models, one) + _working_bytes(models, one) for one in known
    }
    if models[0].dtype == torch.float32:
        size = sum(matrix.nbytes for matrix in _matrices(models)) // 2
        needs = {"--dtype bfloat16": size + _working_bytes(models, EngineWeights()), **needs}
    fitting = [f"{option} ({byte_size(need)})" for option, need in needs.items() if need <= available]
    return f"What would fit: {' or '.join(fitting)}." if fitting else "Use a smaller model, or one in a GGUF file."


def _blocks_of(model: nn.Module) -> Mapping[str, BlockWeight] | None:
    """The blocks of a model whose weights are in a GGUF file."""
    sources = (source_of(part.weight) for part in model.modules() if isinstance(part, nn.Linear))
    return next(filter(None, (getattr(source, "blocks", None) for source in sources)), None)


def _working_bytes(models: Sequence[PreTrainedModel], weights: EngineWeights) -> int:
    """What is needed besides weights: copies of one, in float32 where it is rounded or unpacked, KV caches, logits."""
    copies = (matrix.count * (2 if weights.as_loaded and not matrix.in_blocks else 5) for matrix in _matrices(models))
    typical, longer = sum(cache_bytes(model, CONTEXT) for model in models), cache_bytes(models[0], LONG)
    return max(copies, default=0) + max(typical, min(LONG_BYTES, longer)) + BUFFERS


def _matrices(models: Sequence[nn.Module]) -> list[_Matrix]:
    """The weights of all linear layers, those that models share once, whether an engine has replaced them or not.

    models: the target first.
    """
    parts = [(name, part, model) for model in models for name, part in model.named_modules()]
    tied = {id(part.weight) for _, part, _ in parts if isinstance(part, nn.Embedding)}
    found: dict[object, _Matrix] = {}
    for name, part, model in reversed(parts):  # those of the target replace those that a drafter shares
        if not isinstance(part, EngineLinear | nn.Linear):
            continue
        weight = part.original[0] if isinstance(part, EngineLinear) else part.weight
        key = (id(part.kernel), part.index) if isinstance(part, EngineLinear) else id(weight)
        count, size = part.in_features * part.out_features, (model if weight is None else weight).dtype.itemsize
        source = None if weight is None else source_of(weight)
        stored = count * (size if source is None else source.itemsize)
        found[key] = _Matrix(
            *(name, count, count * size, stored, source is None),
            is_tied=id(weight) in tied,
            joins=isinstance(source, TableRows) and source.values is not None,
            in_blocks=hasattr(source, "blocks"),
            is_drafter=model is not models[0],
        )
    return [*found.values()]


def _bytes(matrix: _Matrix, weights: EngineWeights) -> int:
    if weights.as_loaded:
        return matrix.stored
    weights = weights.for_drafter() if matrix.is_drafter else weights
    kind = "int8" if weights.format == "int4" and matrix.name.endswith(EIGHT_BITS) else weights.format
    if kind == "gguf":
        with suppress(AttributeError, KeyError):  # a weight of another type stays as it is
            return int(matrix.count * weights.blocks.bytes_of(matrix.name))  # type: ignore[union-attr]
        return matrix.stored
    return int(matrix.count * BYTES[kind])
