"""Kernels of linear layers in which the bits of an output row do not depend on how many rows are computed at once."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from utils.engine.compiled_products import CompiledKernel, JoinedKernels
from utils.engine.module_swap import GroupBuilder, Kernel
from utils.engine.stored_weights import data
from utils.engine.weight_blocks import BlockWeight, have_one_form
from utils.engine.weight_format import EngineWeights

BLOCK_ROWS = 32  # of BlockedKernel


class BlockedKernel:
    """Any device and number format: rows are padded to full blocks, so that the same PyTorch kernel always runs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        padded = pad(rows, (0, 0, 0, -len(rows) % BLOCK_ROWS))
        products = [linear(block, self._weight, self._bias) for block in padded.split(BLOCK_ROWS)]
        return torch.cat(products)[: len(rows)].view(*x.shape[:-1], -1)

    def weight(self) -> Tensor:
        return self._weight

    def tensors(self) -> Iterator[Tensor]:
        yield from (part for part in (self._weight, self._bias) if part is not None)


@dataclass(frozen=True, slots=True)
class KnownLayers:
    """What a builder knows of layers besides their weights: names by id(layer), and id(weight) of output heads."""

    names: Mapping[int, str]
    heads: Container[int]

    @classmethod
    def of(cls, models: Sequence[PreTrainedModel]) -> "KnownLayers":
        """The layers of a pair. models: the target first, whose names count for layers that it shares."""
        parts = [(id(part), name) for model in reversed(models) for name, part in model.named_modules()]
        return cls(dict(parts), {id(model.get_output_embeddings().weight) for model in models})


def blocked_builder(layers: Sequence[nn.Linear]) -> Kernel:
    """Return one BlockedKernel for layers with the same input."""
    weights = [data(layer.weight) for layer in layers]
    return BlockedKernel(weights[0] if len(weights) == 1 else torch.cat(weights), _joined_bias(layers))


def compiled_builder(weights: EngineWeights, known: KnownLayers) -> GroupBuilder:
    """Return a function that builds one compiled kernel for layers with the same input, in the format of `weights`.
    float32 weights whose file holds them in bfloat16 stay there, because the values are the same.
    """

    def build(layers: Sequence[nn.Linear]) -> Kernel:
        is_head = any(id(layer.weight) in known.heads for layer in layers)
        forms = [
            _shortened(weights.form(known.names.get(id(layer), ""), layer.weight, is_head=is_head)) for layer in layers
        ]
        tensors = [form for form in forms if isinstance(form, Tensor)]
        blocks = [form for form in forms if isinstance(form, BlockWeight)]
        if not blocks and len({tensor.dtype for tensor in tensors}) == 1:
            return CompiledKernel(tensors, _joined_bias(layers))
        if not tensors and have_one_form(blocks):
            return CompiledKernel(blocks, _joined_bias(layers))
        parts = zip(forms, layers, strict=True)
        return JoinedKernels([CompiledKernel(cast(Any, [form]), layer.bias) for form, layer in parts])

    return build


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of layers as one, or None if they have none."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat([torch.zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers])


def _shortened(form: Tensor | BlockWeight) -> Tensor | BlockWeight:
    """A weight in bfloat16 if that holds the same values."""
    if isinstance(form, BlockWeight) or form.dtype == torch.bfloat16:
        return form
    for part in (form[:1], form):  # most weights differ in the first row
        short = part.bfloat16()
        if not torch.equal(short.float(), part.float()):
            return form
    return short
