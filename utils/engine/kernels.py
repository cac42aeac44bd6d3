"""Kernels of linear layers in which the bits of an output row do not depend on how many rows are computed at once."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from utils.engine.compiled_products import CompiledKernel, JoinedKernels
from utils.engine.module_swap import Kernel
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


class CompiledBuilder:
    """Builds one compiled kernel for layers with the same input, in the format of `weights`. float32 weights whose file
    holds them in bfloat16 stay there, because the values are the same.

    models: the target first. A drafter's own layers have the format of drafters; those of no model have no name.
    """

    def __init__(self, weights: EngineWeights, models: Sequence[PreTrainedModel]) -> None:
        self._weights = weights
        self._known = {
            id(part): (name, weights if model is models[0] else weights.for_drafter())
            for model in models
            for name, part in model.named_modules()
        }
        self._heads = {id(model.get_output_embeddings().weight) for model in models}

    def __call__(self, layers: Sequence[nn.Linear]) -> Kernel:
        forms = [self._form(layer) for layer in layers]
        tensors = [form for form in forms if isinstance(form, Tensor)]
        blocks = [form for form in forms if isinstance(form, BlockWeight)]
        if not blocks and len({tensor.dtype for tensor in tensors}) == 1:
            return CompiledKernel(tensors, _joined_bias(layers))
        if not tensors and have_one_form(blocks):
            return CompiledKernel(blocks, _joined_bias(layers))
        parts = zip(forms, layers, strict=True)
        return JoinedKernels([CompiledKernel(cast(Any, [form]), layer.bias) for form, layer in parts])

    def _form(self, layer: nn.Linear) -> Tensor | BlockWeight:
        name, weights = self._known.get(id(layer), ("", self._weights))
        form = weights.form(name, layer.weight, is_head=id(layer.weight) in self._heads)
        return form if isinstance(form, BlockWeight) else _shortened(form)


def blocked_builder(layers: Sequence[nn.Linear]) -> Kernel:
    """Return one BlockedKernel for layers with the same input."""
    weights = [data(layer.weight) for layer in layers]
    return BlockedKernel(weights[0] if len(weights) == 1 else torch.cat(weights), _joined_bias(layers))


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of layers as one, or None if they have none."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat([torch.zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers])


def _shortened(form: Tensor) -> Tensor:
    """A weight in bfloat16 if that holds the same values."""
    if form.dtype == torch.bfloat16:
        return form
    for part in (form[:1], form):  # most weights differ in the first row
        short = part.bfloat16()
        if not torch.equal(short.float(), part.float()):
            return form
    return short
