"""The number format and the size of weights that are held as tensors of a model, and the size that engines need."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.decode.model_info import context_length
from utils.engine.module_swap import EngineLinear
from utils.engine.weight_format import EngineWeights
from utils.text import byte_size

CONTEXT = 2048  # tokens of a typical long run
BUFFERS = 200_000_000  # bytes of activations, logits and compiled code
# Bytes of a weight with its share of scales and minimums, as engines hold it. Blocks of GGUF files differ in size.
BYTES = {"bfloat16": 2.0, "int8": 1.01, "int4": 0.75, "gguf": 0.75}


def weight_format(model: PreTrainedModel) -> str:
    """Return the number format of a model's weights as loaded: "float32", "bfloat16", ... or "quantized"."""
    dtype = next(model.parameters()).dtype
    return "quantized" if getattr(model, "is_quantized", False) else str(dtype).removeprefix("torch.")


def tensor_bytes(parts: Iterable[nn.Module]) -> int:
    """Return the bytes of all parameters, buffers and kernels. Those that several modules share count once, and those
    without data not at all.
    """
    tensors = {id(tensor): tensor for part in parts for module in part.modules() for tensor in _tensors(module)}
    return sum(tensor.nbytes for tensor in tensors.values() if not tensor.is_meta)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The weight of a linear layer. nbytes: as loaded. is_held: in memory. is_tied: also an embedding."""

    name: str
    count: int
    nbytes: int
    is_held: bool
    is_tied: bool


def placeholder_bytes(models: Sequence[PreTrainedModel]) -> int:
    """Return the bytes that weights in files take once they are read."""
    return sum(matrix.nbytes for matrix in _matrices(models) if not matrix.is_held)


def decoder_bytes(models: Sequence[PreTrainedModel], weights: EngineWeights) -> int:
    """Return the bytes of all linear weights in an engine's format. Weights that models share count once."""
    return sum(_bytes(matrix, weights) for matrix in _matrices(models))


def freed_bytes(models: Sequence[PreTrainedModel]) -> int:
    """Return the bytes of linear weights in memory that packing frees: all that no embedding needs."""
    return sum(matrix.nbytes for matrix in _matrices(models) if matrix.is_held and not matrix.is_tied)


def unread_bytes(model: nn.Module, weights: EngineWeights, *, besides: nn.Module | None = None) -> int:
    """Return the bytes, in an engine's format, of the weights that a model leaves to files and to the engine."""
    other = set() if besides is None else {id(weight) for weight in besides.parameters()}
    linears = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return sum(
        _bytes(_Matrix(name, part.weight.numel(), part.weight.nbytes, is_held=False, is_tied=False), weights)
        for name, part in linears
        if part.weight.is_meta and id(part.weight) not in other
    )


def memory_problem(models: Sequence[PreTrainedModel], need: int, available: int) -> str:
    """Say that an engine does not fit into memory, if it does not. need: bytes of its weights."""
    total = need + _working_bytes(models)
    if models[0].device.type != "cpu" or total <= available:
        return ""
    return f"it needs {byte_size(total)} of memory, and {byte_size(available)} are available"


def smaller_form(models: Sequence[PreTrainedModel], weights: EngineWeights, available: int) -> str:
    """A sentence that names number formats in which the models would fit."""
    working, known = _working_bytes(models), {"--engine-weights int8": "int8", "--engine-weights int4": "int4"}
    sizes = {option: decoder_bytes(models, EngineWeights(kind)) + working for option, kind in known.items()}
    if models[0].dtype == torch.float32:
        sizes = {"--dtype bfloat16": sum(matrix.nbytes for matrix in _matrices(models)) // 2 + working, **sizes}
    fitting = [f"{option} ({byte_size(size)})" for option, size in sizes.items() if size <= available]
    return f"What would fit: {' or '.join(fitting)}." if fitting else "Use a smaller model, or one in a GGUF file."


def _working_bytes(models: Sequence[PreTrainedModel]) -> int:
    """What forward passes need besides weights: a layer that is being read twice over, a KV cache, logits."""
    largest = max((matrix.count for matrix in _matrices(models)), default=0)
    return 4 * 2 * largest + sum(map(_cache_bytes, models)) + BUFFERS


def _cache_bytes(model: PreTrainedModel) -> int:
    """The KV cache of a run of CONTEXT tokens."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // max(1, getattr(config, "num_attention_heads", 1))
    positions = min(CONTEXT, context_length(model) or CONTEXT)
    return int(2 * 4 * config.num_hidden_layers * heads * size * positions)


def _matrices(models: Sequence[PreTrainedModel]) -> list[_Matrix]:
    """The weights of all linear layers, those that models share once, whether an engine has replaced them or not."""
    parts = [(name, part, model) for model in models for name, part in model.named_modules()]
    tied = {id(part.weight) for _, part, _ in parts if isinstance(part, nn.Embedding)}
    found: dict[object, _Matrix] = {}
    for name, part, model in parts:
        if not isinstance(part, EngineLinear | nn.Linear):
            continue
        weight = part.original[0] if isinstance(part, EngineLinear) else part.weight
        key = (id(part.fused), part.index) if isinstance(part, EngineLinear) else id(weight)
        count, size = part.in_features * part.out_features, (model if weight is None else weight).dtype.itemsize
        is_held = weight is None or not weight.is_meta
        found[key] = _Matrix(name, count, count * size, is_held=is_held, is_tied=id(weight) in tied)
    return [*found.values()]


def _bytes(matrix: _Matrix, weights: EngineWeights) -> int:
    if weights.as_loaded:
        return matrix.nbytes
    share = BYTES[weights.format]
    with suppress(AttributeError, KeyError, TypeError):  # blocks of a GGUF file know their own size
        bits, group = weights.blocks.form_of(matrix.name)  # type: ignore[union-attr]
        share = (0.5 if bits <= 4 else 1.0) + 8.0 / group
    return int(matrix.count * share)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
    if isinstance(module, EngineLinear):
        yield from (*module.fused.kernel.tensors(), *(tensor for tensor in module.original if tensor is not None))
