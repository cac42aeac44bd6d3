"""Linear weights as small integers with a scale per group, the form that int8, int4 and GGUF weights share.

Engines multiply with this form directly, or unpack it with `dense`. Rounding to int8 and int4 is here; the blocks of
GGUF files are read by `utils.models.gguf_blocks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

INT4_GROUP = 32
_ROUNDED_AT_ONCE = 1 << 18  # weights
_RANGES = (1.0, 0.93, 0.86)  # of a group, that round_int4 tries


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight (N, K) = (values + offset) * scales + shifts. Each group of inputs of a row has a scale and a shift.

    values: (N, K), uint8 or int8, each within `bits` bits. scales: (N, K / group), float32, float16 or bfloat16.
    shifts: like the scales, or None if they are all zero. offset: a small negative integer or 0.
    """

    values: Tensor
    scales: Tensor
    shifts: Tensor | None
    group: int
    bits: int
    offset: int = 0

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.values.shape

    def dense(self) -> Tensor:
        """Return the weight as float32 (N, K): one rounding for the product and one for the sum."""
        scales = self.scales.float()[:, :, None]
        grouped = self.values.unflatten(1, (-1, self.group)) * scales
        if self.shifts is not None or self.offset:
            grouped += self.offset * scales + (0.0 if self.shifts is None else self.shifts.float()[:, :, None])
        dense: Tensor = grouped.flatten(1)
        return dense

    def rows(self, start: int, end: int) -> "BlockWeight":
        """Return the rows from `start` up to `end`, which share memory with these."""
        shifts = None if self.shifts is None else self.shifts[start:end]
        return replace(self, values=self.values[start:end], scales=self.scales[start:end], shifts=shifts)

    def columns(self, start: int, end: int) -> "BlockWeight":
        """Return the inputs from `start` up to `end`. Both are multiples of the group, or one group has all inputs."""
        whole, groups = self.group == self.shape[1], slice(start // self.group, -(-end // self.group))
        shifts = None if self.shifts is None else self.shifts[:, groups]
        values, scales = self.values[:, start:end], self.scales[:, groups]
        return replace(self, values=values, scales=scales, shifts=shifts, group=end - start if whole else self.group)

    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        parts = (self.values, self.scales, *(() if self.shifts is None else (self.shifts,)))
        return sum(part.nbytes for part in parts)


def have_one_form(blocks: Sequence[BlockWeight]) -> bool:
    """Whether weights differ in their values alone, so that they can be one weight, row below row."""
    forms = {
        (block.group, block.bits, block.offset, block.values.dtype, block.scales.dtype, block.shifts is None)
        for block in blocks
    }
    return len(forms) == 1


def round_int8(weight: Tensor) -> BlockWeight:
    """Round a weight (N, K) to int8 with one scale for each row.

    Scales are values of bfloat16, because kernels of PyTorch take no others.
    """
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), 1)
    # A few rows at a time, so that what is computed on the way stays in the processor's cache.
    size = max(1, _ROUNDED_AT_ONCE // weight.shape[1])
    parts = (part.split(size) for part in (weight.detach(), values, scales))
    for own, own_values, own_scales in zip(*parts, strict=True):
        rows = own.float()
        # Without the lower bound a row of zeros would be divided by zero.
        largest = rows.abs().amax(dim=1, keepdim=True).clamp(min=256 * torch.finfo(torch.float32).tiny)
        # Off by at most 0.2 %, so the largest value is always 127, and weights that are rounded again stay the same.
        own_scales[:] = (largest / 127).bfloat16()
        # A scale that was rounded down gives quotients above 127, so they are clamped.
        own_values[:] = (rows / own_scales).round_().clamp_(-127, 127)
    return BlockWeight(values, scales, None, group=weight.shape[1], bits=8)


def round_int4(weight: Tensor) -> BlockWeight:
    """Round a weight (N, K) to 4 bits in groups of INT4_GROUP. Raises ValueError if K is not a multiple of it.

    Each group starts from its smallest and largest weight, and then takes the scale and minimum that fit its integers
    best (least squares), for the whole and for narrower ranges, if that lowers its squared error. Scales and the
    middles of the groups are values of bfloat16, because kernels of PyTorch take no others.
    """
    # A few rows at a time, so that what is computed on the way stays in the processor's cache.
    parts = [_rounded_rows(rows) for rows in weight.detach().split(max(1, _ROUNDED_AT_ONCE // weight.shape[1]))]
    values, scales, middles = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return BlockWeight(values, scales, middles, group=INT4_GROUP, bits=4, offset=-8)


def _rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values (N, K), scales and minimums (N, K / group) of rows (N, K)."""
    groups = rows.float().unflatten(1, (-1, INT4_GROUP))  # (N, K / group, group)
    low, high, mean = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), groups.mean(-1, keepdim=True)
    scales, minimums = _representable((high - low) / 15, low)
    error = _error(groups, scales, minimums)
    for width in _RANGES:
        middle, half = (low + high) / 2, width * (high - low) / 2
        fitted = _representable(*_least_squares(groups, mean, _integers(groups, 2 * half / 15, middle - half)))
        fitted_error = _error(groups, *fitted)
        better = fitted_error < error
        scales, minimums, error = (
            torch.where(better, new, old)
            for new, old in zip((*fitted, fitted_error), (scales, minimums, error), strict=True)
        )
    values = _integers(groups, scales, minimums).to(torch.uint8)
    return values.flatten(1), scales[..., 0].bfloat16(), (minimums + 8 * scales)[..., 0].bfloat16()


# Scales, minimums and errors have the shape (N, K / group, 1) below.


def _representable(scales: Tensor, minimums: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest scales and minimums whose scales and middles are values of bfloat16."""
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny).bfloat16().float()
    return scales, (minimums + 8 * scales).bfloat16().float() - 8 * scales


def _integers(groups: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    return (groups - minimums).div_(scales).round_().clamp_(0, 15)


def _error(groups: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """The squared error of rounding."""
    rounded = _integers(groups, scales, minimums).mul_(scales).add_(minimums)
    return rounded.sub_(groups).square_().sum(-1, keepdim=True)


def _least_squares(groups: Tensor, mean: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minimums with which values * scales + minimums is closest to the groups. mean: of the groups."""
    middle = values.mean(-1, keepdim=True)
    centred = values.sub_(middle)
    spread = centred.square().sum(-1, keepdim=True).clamp(min=1)  # zero only for constant groups
    scales = centred.mul_(groups).sum(-1, keepdim=True) / spread
    return scales, mean - scales * middle
