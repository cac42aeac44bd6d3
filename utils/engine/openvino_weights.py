"""Products with linear weights as OpenVINO nodes: float32, or small integers with scales.

OpenVINO multiplies integer weights with inputs that it rounds to int8, with one scale for each group of inputs of a
row. Only weights without an offset, or with one integer offset per group, keep the bits of a row independent of the
other rows. So values are stored around zero, and what a group's minimum adds is a small second product with the sums
of the inputs of each group.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.engine.openvino_runtime import FLOAT, ops, ov, sizes
from utils.engine.weight_blocks import BlockWeight, joined

Form = Tensor | BlockWeight  # in which a layer's weight is computed
SHARED = 1 << 16  # bytes from which a constant is not copied by OpenVINO


class Constants:
    """The weights of one graph, in memory that can be returned once OpenVINO has them in its own layout.

    A compiled graph keeps the constants that it was made from, but reads them only until it has packed them. So their
    pages are returned, and their addresses stay reserved, after the graph was compiled and has run.
    """

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._tensors: list[Any] = []  # of OpenVINO, which nodes do not keep
        self.nbytes = 0  # what the graph holds of them in its own layout

    def drop(self) -> None:
        """Return the memory. The graph must have run, and must not be compiled again."""
        for part in self._maps:
            part.madvise(mmap.MADV_DONTNEED)

    def product(self, x: Any, forms: Sequence[Form], biases: Sequence[Tensor | None]) -> Any:
        """The node x @ W^T + b for the weights of layers that read x, their outputs one after the other."""
        blocks = [form for form in forms if isinstance(form, BlockWeight)]
        whole = joined(blocks) if len(blocks) == len(forms) else None
        if whole is not None:
            y = self.multiplied(x, whole)
        elif blocks:
            y = ops.concat([self.multiplied(x, form) for form in forms], 1)
        else:
            y = ops.matmul(x, self._floats([form for form in forms if isinstance(form, Tensor)]), False, True)
        if all(bias is None for bias in biases):
            return y
        pairs = zip(forms, biases, strict=True)
        rows = [torch.zeros(form.shape[0]) if bias is None else bias.detach().float() for form, bias in pairs]
        return ops.add(y, ops.constant(torch.cat(rows)[None].numpy()))

    def multiplied(self, x: Any, weight: Form) -> Any:
        """The node x @ W^T."""
        if isinstance(weight, Tensor):
            return ops.matmul(x, self._floats([weight]), False, True)
        y = ops.matmul(x, self._centred(weight), False, True)
        offsets = _offsets(weight)
        if offsets is None:
            return y
        groups = ops.reshape(x, sizes(-1, weight.shape[1] // weight.group, weight.group), False)
        sums = ops.reduce_sum(groups, sizes(2), False)
        return ops.add(y, ops.matmul(sums, self._floats([offsets]), False, True))

    def _floats(self, weights: Sequence[Tensor]) -> Any:
        """A node with weights (N, K) row below row, in float32, whatever their own format is."""
        total = sum(len(weight) for weight in weights)
        whole, start = self._memory((total, weights[0].shape[1]), torch.float32), 0
        for weight in weights:
            whole[start : start + len(weight)] = weight.detach()
            start += len(weight)
        return ops.constant(whole.numpy(), shared_memory=True)

    def _centred(self, weight: BlockWeight) -> Any:
        """The node (values - centre) * scales, shape (N, K)."""
        rows, inputs = weight.shape
        signed = (weight.values.to(torch.int16) - _centre(weight)).to(torch.int8)
        shape = (rows, inputs) if weight.group == inputs else (rows, inputs // weight.group, weight.group)
        integers = self._integers(signed.reshape(shape), four_bits=weight.bits <= 4)
        scales = self._memory((*shape[:-1], 1), torch.float32)
        scales[:] = weight.scales.reshape(scales.shape)
        scaled = ops.multiply(ops.convert(integers, FLOAT), ops.constant(scales.numpy(), shared_memory=True))
        return scaled if len(shape) == 2 else ops.reshape(scaled, sizes(rows, inputs), False)

    def _integers(self, values: Tensor, *, four_bits: bool) -> Any:
        if not four_bits:
            whole = self._memory(values.shape, torch.int8)
            whole[:] = values
            return ops.constant(whole.numpy(), shared_memory=True)
        nibbles = values.reshape(-1, 2).view(torch.uint8) & 15
        bits = self._memory((len(nibbles),), torch.uint8)
        torch.bitwise_or(nibbles[:, 0], nibbles[:, 1] << 4, out=bits)
        # A type that numpy lacks.
        tensor = ov.Tensor(bits.numpy(), ov.Shape(list(values.shape)), ov.Type.i4)
        self._tensors.append(tensor)
        return ops.constant(tensor, shared_memory=True)

    def _memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in a mapping of its own, in huge pages where the system has them: they are filled much faster."""
        count = int(np.prod(shape))
        self.nbytes += count * dtype.itemsize
        if not hasattr(mmap, "MADV_DONTNEED") or count * dtype.itemsize < SHARED:
            made = torch.empty(*shape, dtype=dtype)
            self._tensors.append(made)
            return made
        part = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # not every system has them
            part.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(part)
        return torch.frombuffer(part, dtype=dtype).view(*shape)


def _centre(weight: BlockWeight) -> int:
    return 0 if weight.values.dtype is torch.int8 else 1 << (weight.bits - 1)


def _offsets(weight: BlockWeight) -> Tensor | None:
    """What is added to the centred weights of each group, (N, K / group), or None if it is zero everywhere."""
    offsets = weight.scales.float() * _centre(weight)
    if weight.minimums is not None:
        offsets = offsets + weight.minimums.float()
    return offsets if bool(offsets.any()) else None
