"""Kernels of PyTorch for linear weights that are computed in another format than float32, on a CPU.

Inputs and outputs of these kernels are rounded to bfloat16, and sums are float32. So an output head is computed in
float32 with rounded weights: bfloat16 has too few digits to tell the best tokens apart.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from utils.decode.engine_forward import in_prefill
from utils.engine.kernels import (
    PREFILL_SIZES,
    SPLITS,
    TESTED_OUTPUTS,
    BlockedKernel,
    Kernel,
    PackedKernel,
    is_row_invariant,
    packed_kernel_builder,
)
from utils.engine.module_swap import GroupBuilder, joined_bias
from utils.engine.weight_blocks import BlockWeight, joined
from utils.engine.weight_format import EngineWeights

_INT4_GROUPS = (32, 64, 128, 256)  # that the operator takes
_INT4_ROWS = 16  # it takes multiples of this number of outputs
# Larger chunks than those of other weights, because every chunk unpacks the weights once more.
UNPACKED_PREFILL_SIZES = (*PREFILL_SIZES, *range(PREFILL_SIZES[-1] + 64, 2049, 64))
_UNPACKED_ROWS = 100  # of a prefill, from which unpacking a weight takes less time than it saves


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


class Int8Kernel:
    """int8 weights with one scale for each output."""

    def __init__(self, block: BlockWeight, bias: Tensor | None) -> None:
        self._block, self._bias = block, bias
        self._scale = block.scales[:, 0].bfloat16()  # (N,), exact for weights that `round_int8` has rounded

    def __call__(self, x: Tensor) -> Tensor:
        if _unpacks(x):
            return linear(x, self.weight(), self._bias)
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        product: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self._block.values, self._scale)
        return _with_bias(product, self._bias, x)

    def weight(self) -> Tensor:
        return self._block.dense()

    def tensors(self) -> Iterator[Tensor]:
        yield from (self._block.values, self._block.scales, self._scale, *_given(self._bias))


class Int4Kernel:
    """Weights of up to 8 bits in groups of 32, 64, 128 or 256 inputs, by PyTorch's operator for 4 bits.

    Wider integers are split into their upper and lower 4 bits, which are two products. Scales and the middles of the
    groups are rounded to bfloat16.
    """

    def __init__(self, block: BlockWeight, bias: Tensor | None) -> None:
        self._block, self._bias = block, bias
        values, scales = block.values.int(), block.scales
        minimums = torch.zeros_like(scales) if block.minimums is None else block.minimums
        if block.bits == 4:
            self._packed = [_packed(values, scales, minimums + 8 * scales)]
        else:
            high = _packed((values >> 4) + 8, 16 * scales, torch.zeros_like(scales))
            self._packed = [high, _packed(values & 15, scales, minimums + 8 * scales)]

    def __call__(self, x: Tensor) -> Tensor:
        if _unpacks(x):
            return linear(x, self.weight(), self._bias)
        rows, outputs = x.reshape(-1, x.shape[-1]).bfloat16(), self._block.shape[0]
        products = [
            torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, self._block.group, pairs)[:, :outputs]
            for packed, pairs in self._packed
        ]
        return _with_bias(products[0] if len(products) == 1 else products[0].float() + products[1], self._bias, x)

    def weight(self) -> Tensor:
        return self._block.dense()

    def tensors(self) -> Iterator[Tensor]:
        yield from (*(part for pair in self._packed for part in pair), *_given(self._bias))
        yield from (part for part in (self._block.values, self._block.scales, self._block.minimums) if part is not None)


class Bfloat16Kernel:
    """A kernel over bfloat16 weights, whose results become float32."""

    def __init__(self, kernel: Kernel, bias: Tensor | None) -> None:
        self._kernel, self._bias = kernel, bias

    def __call__(self, x: Tensor) -> Tensor:
        return _with_bias(self._kernel(x.bfloat16()), self._bias, x)

    def weight(self) -> Tensor:
        return self._kernel.weight().float()

    def tensors(self) -> Iterator[Tensor]:
        yield from (*self._kernel.tensors(), *_given(self._bias))


def block_kernel(block: BlockWeight, bias: Tensor | None) -> Kernel | None:
    """Return the kernel for a weight of small integers, or None if PyTorch has none for its form."""
    if block.group == block.shape[1] and block.values.dtype == torch.int8 and block.minimums is None:
        return Int8Kernel(block, bias)
    return Int4Kernel(block, bias) if block.group in _INT4_GROUPS else None


def bfloat16_kernel(weight: Tensor, bias: Tensor | None, counts: Sequence[int], known: dict[str, int]) -> Kernel:
    """Return a row-invariant kernel for bfloat16 weights. counts, known: as for `packed_kernel_builder`."""
    rounded, inputs = weight.detach().bfloat16(), weight.shape[1]
    shape = "bfloat16 " + "x".join(map(str, weight.shape))
    if shape not in known:
        fitting = (parts for parts in SPLITS if inputs % parts == 0)
        part = rounded[:TESTED_OUTPUTS]
        kernels = ((parts, Bfloat16Kernel(PackedKernel(part, None, parts), None)) for parts in fitting)
        known[shape] = next((parts for parts, kernel in kernels if is_row_invariant(kernel, inputs, counts)), 0)
    parts = known[shape]
    fits = parts and inputs % parts == 0
    return Bfloat16Kernel(PackedKernel(rounded, None, parts) if fits else BlockedKernel(rounded, None), bias)


def format_builder(
    weights: EngineWeights, counts: Sequence[int], known: dict[str, int], *, layers: KnownLayers
) -> GroupBuilder:
    """Return a function that builds the kernel of layers with the same input in the format that `weights` names.

    counts, known: as for `packed_kernel_builder`.
    """
    pack = packed_kernel_builder(counts, known)

    def build(group: Sequence[nn.Linear]) -> Kernel | None:
        bias, is_head = joined_bias(group), any(id(layer.weight) in layers.heads for layer in group)
        forms = [weights.form(layers.names.get(id(layer), ""), layer.weight, is_head=is_head) for layer in group]
        if weights.format == "bfloat16":
            whole = torch.cat([form for form in forms if isinstance(form, Tensor)])
            return pack(whole.float(), bias) if is_head else bfloat16_kernel(whole, bias, counts, known)
        blocks = [form for form in forms if isinstance(form, BlockWeight)]
        whole_block = joined(blocks) if len(blocks) == len(forms) and not is_head else None
        if whole_block is not None and (kernel := block_kernel(whole_block, bias)):
            return kernel
        return pack(torch.cat([form.dense() if isinstance(form, BlockWeight) else form for form in forms]), bias)

    return build


def _packed(values: Tensor, scales: Tensor, middles: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the weight (values - 8) * scales + middles. values: (N, K), 0 to 15. scales, middles: (N, K / group)."""
    missing = -len(values) % _INT4_ROWS
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(pad(values, (0, 0, 0, missing)), 1)
    pairs = pad(torch.stack([scales, middles], dim=-1), (0, 0, 0, 0, 0, missing))
    return packed, pairs.transpose(0, 1).bfloat16().contiguous()  # (K / group, N, 2)


def _unpacks(x: Tensor) -> bool:
    """Whether a product unpacks its weight first: operators for integers take as long for every further row."""
    return in_prefill() and x.numel() > _UNPACKED_ROWS * x.shape[-1]


def _with_bias(product: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return a product (rows, N) as float32 in the leading dimensions of x, with the bias added."""
    y = product.float().view(*x.shape[:-1], -1)
    return y if bias is None else y.add_(bias)


def _given(bias: Tensor | None) -> tuple[Tensor, ...]:
    return () if bias is None else (bias,)
