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
_LANES = 16  # weights that round_int8 reads at once
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
    rows = _readable(weight)
    values, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows), 1)
    arguments = words(_ROUND, rows=rows, values=values, scales=scales, inputs=rows.shape[1])
    WORKERS.run(*job_list([(_int8_function(rows.dtype), arguments, len(rows))]))
    values, scales = (part.to(weight.device) for part in (values, scales))
    return BlockWeight(values, scales, None, group=weight.shape[1], bits=8)


def _readable(weight: Tensor) -> Tensor:
    """A weight as machine code reads it."""
    rows = weight.detach().cpu().contiguous()
    return rows if rows.dtype == torch.bfloat16 else rows.float()


def round_int4(weight: Tensor) -> BlockWeight:
    """Round a weight (N, K) to 4 bits in groups of INT4_GROUP. Raises ValueError if K is not a multiple of it.

    Each group starts from its smallest and largest weight, and then takes the scale and middle that fit its integers
    best (least squares), for the whole and for narrower ranges, if that lowers its squared error. Scales and middles
    are values of bfloat16.
    """
    if weight.shape[1] % INT4_GROUP:
        raise ValueError(f"{weight.shape[1]} inputs are not a multiple of {INT4_GROUP}")
    rows = _readable(weight)
    values = torch.empty(rows.shape, dtype=torch.uint8)
    scales, middles = torch.empty(2, len(rows), rows.shape[1] // INT4_GROUP, dtype=torch.bfloat16)
    arguments = words(_ROUND, rows=rows, values=values, scales=scales, middles=middles, inputs=rows.shape[1])
    WORKERS.run(*job_list([(_int4_function(rows.dtype), arguments, len(rows))]))
    values, scales, middles = (part.to(weight.device) for part in (values, scales, middles))
    return BlockWeight(values, scales, middles, group=INT4_GROUP, bits=4, offset=-8)


_BITS, _HALF = ir.IntType(32), ir.IntType(16)
_ROUND = {"rows": POINTER, "values": POINTER, "scales": POINTER, "middles": POINTER, "inputs": INT}


def _floats(code: Code, rows: ir.Value, index: ir.Value, *, dtype: torch.dtype, lanes: int) -> ir.Value:
    """Weights in float32 or bfloat16 from one on, as a vector of float32."""
    stored = FLOAT if dtype == torch.float32 else _HALF
    weights = code.load(code.at(rows, index, stored), typ=ir.VectorType(stored, lanes), align=2)
    return weights if dtype == torch.float32 else code.widened(weights)


@cache
def _int8_function(dtype: torch.dtype) -> int:
    """The address of round(arguments, row) for weights in float32 or bfloat16."""
    code, given, row = item_function(ir.Module("rounding"), "round", _ROUND)
    start, rest = code.mul(row, given["inputs"]), code.urem(given["inputs"], INT(_LANES))
    whole = code.sub(given["inputs"], rest)
    # A vector at a time, and what is left one by one.
    parts = [(start, whole, _LANES), (code.add(start, whole), rest, 1)]

    def largest_of(first: ir.Value, count: ir.Value, lanes: int, least: ir.Value) -> ir.Value:
        def compare(index: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            weights = _floats(code, given["rows"], code.add(first, index), dtype=dtype, lanes=lanes)
            return [code.maximum(code.absolute(weights), found[0])]

        return code.largest(code.repeat(count, [code.splat(least, lanes)], compare, step=lanes, or_never=True)[0])

    def write(first: ir.Value, count: ir.Value, lanes: int, scale: ir.Value) -> None:
        low, high, scales = (code.splat(value, lanes) for value in (FLOAT(-127.0), FLOAT(127.0), scale))

        def divide(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            place = code.add(first, index)
            values = code.nearest(code.fdiv(_floats(code, given["rows"], place, dtype=dtype, lanes=lanes), scales))
            # A scale that was rounded down gives quotients above 127.
            values = code.maximum(low, code.select(code.fcmp_ordered("<", values, high), values, high))
            values = code.fptosi(values, ir.VectorType(BYTE, lanes))
            code.store(values, code.at(given["values"], place, BYTE), align=1)
            return []

        code.repeat(count, [], divide, step=lanes, or_never=True)

    largest = FLOAT(256 * _TINY)  # a row of zeros would be divided by zero
    for part in parts:
        largest = largest_of(*part, largest)
    scale = _bfloat16(code, code.fdiv(largest, FLOAT(127.0)))
    code.store(scale, code.at(given["scales"], row), align=4)
    for part in parts:
        write(*part, scale)
    code.ret_void()
    return compiled(code.module, optimizes=False)("round")


@cache
def _int4_function(dtype: torch.dtype) -> int:
    """The address of round(arguments, row) for weights in float32 or bfloat16."""
    module = ir.Module("rounding")
    code, given, row = item_function(module, "round", _ROUND)
    groups = code.udiv(given["inputs"], INT(INT4_GROUP))
    first = code.mul(row, groups)

    def round_group(index: ir.Value) -> None:
        group = code.add(first, index)
        start = code.mul(group, INT(INT4_GROUP))
        weights = _floats(code, given["rows"], start, dtype=dtype, lanes=INT4_GROUP)
        values, scale, middle = _Group(code, weights).rounded()
        values = code.fptoui(values, ir.VectorType(BYTE, INT4_GROUP))
        code.store(values, code.at(given["values"], start, BYTE), align=1)
        for name, factor in (("scales", scale), ("middles", middle)):
            bits = code.trunc(code.lshr(code.bitcast(factor, _BITS), _BITS(16)), _HALF)
            code.store(bits, code.at(given[name], group, _HALF), align=2)

    code.for_each(groups, round_group)
    code.ret_void()
    return compiled(module)("round")


def _bfloat16(code: Code, value: ir.Value) -> ir.Value:
    """The nearest value of bfloat16, the even one of two."""
    bits = code.bitcast(value, _BITS)
    up = code.add(_BITS(0x7FFF), code.and_(code.lshr(bits, _BITS(16)), _BITS(1)))
    return code.bitcast(code.and_(code.add(bits, up), _BITS(0xFFFF0000)), FLOAT)


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
        scale = _bfloat16(code, code.maximum(scale, FLOAT(_TINY)))
        middle = _bfloat16(code, code.fadd(minimum, code.fmul(scale, FLOAT(8.0))))
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

    def _all(self, value: ir.Value) -> ir.Value:
        return self._code.splat(value, INT4_GROUP)
