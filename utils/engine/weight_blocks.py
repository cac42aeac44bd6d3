"""Linear weights as small integers with a scale per group, the form that int8, int4 and GGUF weights share.

Engines multiply with this form directly, or unpack it with `dense`. Rounding to int8 and int4 is here; the blocks of
GGUF files are read by `utils.models.gguf_model`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from utils.engine.machine_code import (
    BYTE,
    FLOAT,
    INT,
    POINTER,
    WORKERS,
    Code,
    compiled,
    item_function,
    job_list,
    words,
)

INT4_GROUP = 32
_ROUNDED_AT_ONCE = 1 << 18  # weights
_TINY = torch.finfo(torch.float32).tiny
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
        # Converted first, because PyTorch multiplies integers by floats slowly.
        grouped = self.values.float().unflatten(1, (-1, self.group)).mul_(scales)
        if self.shifts is not None or self.offset:
            grouped += self.offset * scales + (0.0 if self.shifts is None else self.shifts.float()[:, :, None])
        dense: Tensor = grouped.flatten(1)
        return dense

    def map(self, function: Callable[..., Tensor], *others: "BlockWeight") -> "BlockWeight":
        """Return the weight whose tensors are function(tensor, those of the others)."""
        names = ("values", "scales", *(() if self.shifts is None else ("shifts",)))
        parts: Any = {name: function(*(getattr(own, name) for own in (self, *others))) for name in names}
        return replace(self, **parts)

    def rows(self, start: int, end: int) -> "BlockWeight":
        """Return the rows from `start` up to `end`, which share memory with these."""
        return self.map(lambda part: part[start:end])


def have_one_form(weights: Sequence[Tensor | BlockWeight]) -> bool:
    """Whether weights differ in their values alone, so that they can be one weight, row below row."""

    def form(weight: Tensor | BlockWeight) -> object:
        if isinstance(weight, Tensor):
            return weight.dtype
        dtypes = weight.values.dtype, weight.scales.dtype
        return weight.group, weight.bits, weight.offset, dtypes, weight.shifts is None

    return len({*map(form, weights)}) == 1


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
        largest = rows.abs().amax(dim=1, keepdim=True).clamp(min=256 * _TINY)
        # Off by at most 0.2 %, so the largest value is always 127, and weights that are rounded again stay the same.
        own_scales[:] = (largest / 127).bfloat16()
        # A scale that was rounded down gives quotients above 127, so they are clamped.
        own_values[:] = (rows / own_scales).round_().clamp_(-127, 127)
    return BlockWeight(values, scales, None, group=weight.shape[1], bits=8)


def round_int4(weight: Tensor) -> BlockWeight:
    """Round a weight (N, K) to 4 bits in groups of INT4_GROUP. Raises ValueError if K is not a multiple of it.

    Each group starts from its smallest and largest weight, and then takes the scale and middle that fit its integers
    best (least squares), for the whole and for narrower ranges, if that lowers its squared error. Scales and middles
    are values of bfloat16.
    """
    if weight.shape[1] % INT4_GROUP:
        raise ValueError(f"{weight.shape[1]} inputs are not a multiple of {INT4_GROUP}")
    rows = weight.detach().cpu().contiguous()
    rows = rows if rows.dtype == torch.bfloat16 else rows.float()
    values = torch.empty(rows.shape, dtype=torch.uint8)
    scales, middles = torch.empty(2, len(rows), rows.shape[1] // INT4_GROUP, dtype=torch.bfloat16)
    arguments = words(_ROUND, rows=rows, values=values, scales=scales, middles=middles, groups=scales.shape[1])
    WORKERS.run(*job_list([(_rounding_function(rows.dtype), arguments, len(rows))]))
    values, scales, middles = (part.to(weight.device) for part in (values, scales, middles))
    return BlockWeight(values, scales, middles, group=INT4_GROUP, bits=4, offset=-8)


_ROUND = {"rows": POINTER, "values": POINTER, "scales": POINTER, "middles": POINTER, "groups": INT}


@cache
def _rounding_function(dtype: torch.dtype) -> int:
    """The address of round(arguments, row) for weights in float32 or bfloat16."""
    stored = FLOAT if dtype == torch.float32 else _HALF
    module = ir.Module("rounding")
    code, given, row = item_function(module, "round", _ROUND)
    first = code.mul(row, given["groups"])

    def round_group(index: ir.Value) -> None:
        group = code.add(first, index)
        start = code.mul(group, INT(INT4_GROUP))
        weights = code.load(code.at(given["rows"], start, stored), typ=ir.VectorType(stored, INT4_GROUP), align=2)
        weights = weights if dtype == torch.float32 else code.widened(weights)
        values, scale, middle = _Group(code, weights).rounded()
        values = code.fptoui(values, ir.VectorType(BYTE, INT4_GROUP))
        code.store(values, code.at(given["values"], start, BYTE), align=1)
        for name, factor in (("scales", scale), ("middles", middle)):
            bits = code.trunc(code.lshr(code.bitcast(factor, _BITS), _BITS(16)), _HALF)
            code.store(bits, code.at(given[name], group, _HALF), align=2)

    code.for_each(given["groups"], round_group)
    code.ret_void()
    return compiled(module)("round")


_BITS, _HALF = ir.IntType(32), ir.IntType(16)


class _Group:
    """Instructions that round the weights of a group, a vector."""

    def __init__(self, code: Code, weights: ir.Value) -> None:
        self._code, self._weights = code, weights

    def rounded(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The integers, as floats, and their scale and middle."""
        code = self._code
        low, high = code.least(self._weights), code.largest(self._weights)
        span, centre = code.fsub(high, low), code.fmul(code.fadd(low, high), FLOAT(0.5))
        best = self._fitted(code.fdiv(span, FLOAT(15.0)), low)
        for part in _RANGES:
            width = code.fmul(span, FLOAT(part))
            start = code.fsub(centre, code.fmul(width, FLOAT(0.5)))
            values = self._integers(code.fdiv(width, FLOAT(15.0)), start)
            other = self._fitted(*self._least_squares(values))
            better = code.fcmp_ordered("<", other[3], best[3])
            best = [code.select(better, new, old) for new, old in zip(other, best, strict=True)]
        return best[0], best[1], best[2]

    def _fitted(self, scale: ir.Value, minimum: ir.Value) -> list[ir.Value]:
        """Integers, the representable scale and middle next to these, and the squared error."""
        code = self._code
        scale = self._bfloat16(code.maximum(scale, FLOAT(_TINY)))
        middle = self._bfloat16(code.fadd(minimum, code.fmul(scale, FLOAT(8.0))))
        minimum = code.fsub(middle, code.fmul(scale, FLOAT(8.0)))
        values = self._integers(scale, minimum)
        rounded = code.fadd(code.fmul(values, self._all(scale)), self._all(minimum))
        errors = code.fsub(rounded, self._weights)
        return [values, scale, middle, code.total(code.fmul(errors, errors))]

    def _integers(self, scale: ir.Value, minimum: ir.Value) -> ir.Value:
        code = self._code
        scale = code.maximum(scale, FLOAT(_TINY))
        values = code.nearest(code.fdiv(code.fsub(self._weights, self._all(minimum)), self._all(scale)))
        values = code.maximum(values, self._all(FLOAT(0.0)))
        return code.select(code.fcmp_ordered("<", values, self._all(FLOAT(15.0))), values, self._all(FLOAT(15.0)))

    def _least_squares(self, values: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The scale and minimum with which values * scale + minimum is closest to the weights."""
        code, share = self._code, FLOAT(1.0 / INT4_GROUP)
        middle, mean = (code.fmul(code.total(each), share) for each in (values, self._weights))
        centred = code.fsub(values, self._all(middle))
        spread = code.maximum(code.total(code.fmul(centred, centred)), FLOAT(1.0))  # zero only for constant groups
        scale = code.fdiv(code.total(code.fmul(centred, self._weights)), spread)
        return scale, code.fsub(mean, code.fmul(scale, middle))

    def _bfloat16(self, value: ir.Value) -> ir.Value:
        """The nearest value of bfloat16, the even one of two."""
        code, bits = self._code, self._code.bitcast(value, _BITS)
        up = code.add(_BITS(0x7FFF), code.and_(code.lshr(bits, _BITS(16)), _BITS(1)))
        return code.bitcast(code.and_(code.add(bits, up), _BITS(0xFFFF0000)), FLOAT)

    def _all(self, value: ir.Value) -> ir.Value:
        return self._code.splat(value, INT4_GROUP)
