"""Linear weights as small integers with a scale per group, the form that int8, int4 and GGUF weights share.

Engines multiply with this form directly, or unpack it with `dense`. Rounding to int8 and int4 is here; the blocks of
GGUF files are read by `utils.models.gguf_blocks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

INT4_GROUP = 32


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight (N, K) = values * scales + minimums, with one scale and minimum for each group of inputs of a row.

    values: (N, K), uint8 or int8, each within `bits` bits. scales: (N, K / group), float32. minimums: like the scales,
    or None if they are all zero.
    """

    values: Tensor
    scales: Tensor
    minimums: Tensor | None
    group: int
    bits: int

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.values.shape

    def dense(self) -> Tensor:
        """Return the weight as float32 (N, K): one rounding for the product and one for the sum."""
        grouped = self.values.unflatten(1, (-1, self.group)) * self.scales[:, :, None]
        if self.minimums is not None:
            grouped += self.minimums[:, :, None]
        dense: Tensor = grouped.flatten(1)
        return dense

    def rows(self, start: int, end: int) -> "BlockWeight":
        """Return the rows from `start` up to `end`, which share memory with these."""
        minimums = None if self.minimums is None else self.minimums[start:end]
        return replace(self, values=self.values[start:end], scales=self.scales[start:end], minimums=minimums)

    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        parts = (self.values, self.scales, *(() if self.minimums is None else (self.minimums,)))
        return sum(part.nbytes for part in parts)


def joined(blocks: Sequence[BlockWeight]) -> BlockWeight | None:
    """Return weights of layers that read the same input as one weight, row below row.

    Returns None if their groups or values differ in form.
    """
    first = blocks[0]
    forms = {(block.group, block.bits, block.values.dtype, block.minimums is None) for block in blocks}
    if len(forms) > 1:
        return None
    minimums = [block.minimums for block in blocks if block.minimums is not None]
    return replace(
        first,
        values=torch.cat([block.values for block in blocks]),
        scales=torch.cat([block.scales for block in blocks]),
        minimums=torch.cat(minimums) if minimums else None,
    )


def round_int8(weight: Tensor) -> BlockWeight:
    """Round a weight (N, K) to int8 with one scale for each row.

    Scales are values of bfloat16, because kernels of PyTorch take no others.
    """
    weight = weight.detach().float()
    # Without the lower bound a row of zeros would be divided by zero.
    largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scales = (largest / 127).bfloat16().float()
    # A scale that was rounded down gives quotients above 127, so they are clamped.
    values = (weight / scales).round_().clamp_(-127, 127).to(torch.int8)
    return BlockWeight(values, scales, None, group=weight.shape[1], bits=8)


def round_int4(weight: Tensor) -> BlockWeight:
    """Round a weight (N, K) to 4 bits in groups of INT4_GROUP. Raises ValueError if K is not a multiple of it.

    Scales and the middles of the groups are values of bfloat16, because kernels of PyTorch take no others.
    """
    groups = weight.detach().float().unflatten(1, (-1, INT4_GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny).bfloat16().float()
    minimums = (low + 8 * scales).bfloat16().float() - 8 * scales
    values = ((groups - minimums) / scales).round_().clamp_(0, 15).to(torch.uint8)
    return BlockWeight(values.flatten(1), scales[..., 0], minimums[..., 0], group=INT4_GROUP, bits=4)
