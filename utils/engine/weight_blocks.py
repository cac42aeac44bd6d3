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
from torch.nn.functional import pad

from utils.engine.machine_code import (
    BYTE,
    FLOAT,
    INT,
    POINTER,
    STORED,
    WORKERS,
    Code,
    compiled,
    item_function,
    job_list,
    words,
)

INT4_GROUP = 32
_LANES = 16  # weights that round_int8 reads at once, and groups that round_int4 rounds at once
_ITEM = 64  # times as many groups are an item
_TINY = torch.finfo(torch.float32).tiny
_RANGES = (1.0, 0.93, 0.86)  # of a group, that round_int4 tries


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight (N, K) = (values + offset) * scales + shifts. Each group of inputs of a row has a scale and a shift.

    values: (N, K), uint8 or int8, each within `bits` bits. scales: (N, K / group), float32, float16 or bfloat16.
    shifts: like the scales, or None if they are all zero. offset: a small negative integer or 0.
    factors: if scales and shifts are uint8 or int8, what they are multiplied with, float32. Some adjacent groups share
    a factor of their scales and one of their shifts, if there are any: (N, 1 or 2 for each of these super-groups).
    """

    values: Tensor
    scales: Tensor
    shifts: Tensor | None
    group: int
    bits: int
    offset: int = 0
    factors: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.values.shape

    def dense(self) -> Tensor:
        """Return the weight as float32 (N, K): one rounding for the product and one for the sum."""
        scales, shifts = self.of_groups()
        # Converted first, because PyTorch multiplies integers by floats slowly.
        grouped = self.values.float().unflatten(1, (-1, self.group)).mul_(scales)
        if shifts is not None or self.offset:
            grouped += self.offset * scales + (0.0 if shifts is None else shifts)
        dense: Tensor = grouped.flatten(1)
        return dense

    def of_groups(self) -> tuple[Tensor, Tensor | None]:
        """Return the scales and shifts (N, K / group, 1) as float32."""
        found = [part.float() for part in (self.scales, self.shifts) if part is not None]
        if self.factors is not None:
            for place, part in enumerate(found):
                factors = self.factors[:, place :: len(found)]
                part.unflatten(1, (factors.shape[1], -1)).mul_(factors[:, :, None])
        scales, *shifts = (part[:, :, None] for part in found)
        return scales, shifts[0] if shifts else None

    def map(self, function: Callable[..., Tensor], *others: "BlockWeight") -> "BlockWeight":
        """Return the weight whose tensors are function(tensor, those of the others)."""
        names = [name for name in ("values", "scales", "shifts", "factors") if getattr(self, name) is not None]
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
        return weight.group, weight.bits, weight.offset, dtypes, weight.shifts is None, weight.factors is None

    return len({*map(form, weights)}) == 1


def round_int8(weight: Tensor) -> BlockWeight:
    """Round a weight (N, K) to int8 with one scale for each row.

    Scales are values of bfloat16.
    """
    rows, inputs = _readable(weight), weight.shape[1]
    rows = pad(rows, (0, _LANES - inputs)) if inputs < _LANES else rows
    values, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows), 1)
    arguments = words(_ROUND, rows=rows, values=values, scales=scales, inputs=rows.shape[1])
    WORKERS.run(*job_list([(_int8_function(kind_of(rows)), arguments, len(rows))]))
    return BlockWeight(values[:, :inputs], scales, None, group=inputs, bits=8)


def _readable(weight: Tensor) -> Tensor:
    """A weight as machine code reads it."""
    rows = weight.detach().contiguous()
    return rows if rows.dtype == torch.bfloat16 else rows.float()


def kind_of(values: Tensor) -> str:
    """The number format of values, as in STORED."""
    return str(values.dtype).removeprefix("torch.")


def round_int4(weight: Tensor) -> BlockWeight:
    """Round a weight (N, K) to 4 bits in groups of INT4_GROUP, of which K is a multiple.

    Each group starts from its smallest and largest weight, and then takes the scale and middle that fit its integers
    best (least squares), for the whole and for narrower ranges, if that lowers its squared error. Scales and middles
    are values of bfloat16.
    """
    groups = _readable(weight).unflatten(1, (-1, INT4_GROUP)).flatten(0, 1)
    count = len(groups)
    groups = pad(groups, (0, 0, 0, _LANES - count)) if count < _LANES else groups  # padding by nothing would copy
    values = torch.empty(groups.shape, dtype=torch.uint8)
    scales, middles = torch.empty(2, len(groups), dtype=torch.bfloat16)
    arguments = words(_ROUND_GROUPS, rows=groups, values=values, scales=scales, middles=middles, groups=len(groups))
    WORKERS.run(*job_list([(_int4_function(kind_of(groups)), arguments, -(-len(groups) // (_LANES * _ITEM)))]))
    values, scales, middles = (part[:count].view(len(weight), -1) for part in (values, scales, middles))
    return BlockWeight(values, scales, middles, group=INT4_GROUP, bits=4, offset=-8)


_BITS, _HALF = ir.IntType(32), ir.IntType(16)
_ROUND = {"rows": POINTER, "values": POINTER, "scales": POINTER, "inputs": INT}
_ROUND_GROUPS = {"rows": POINTER, "values": POINTER, "scales": POINTER, "middles": POINTER, "groups": INT}


@cache
def _int8_function(kind: str) -> int:
    """The address of round(arguments, row) for weights in float32 or bfloat16, at least _LANES in each row."""
    code, given, row = item_function(ir.Module("rounding"), "round", _ROUND)
    start, last = code.mul(row, given["inputs"]), code.sub(given["inputs"], INT(_LANES))

    def weights(index: ir.Value) -> tuple[ir.Value, ir.Value]:
        place = code.add(start, code.smaller(index, last))  # some of the last ones are rounded twice
        return place, code.floats(code.at(given["rows"], place, STORED[kind]), kind, _LANES)

    def compare(index: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        return [code.maximum(code.absolute(weights(index)[1]), found[0])]

    def divide(index: ir.Value) -> None:
        place, values = weights(index)
        values, high = code.nearest(code.fdiv(values, scale)), _all(FLOAT, 127.0)
        # A scale that was rounded down gives quotients above 127.
        values = code.maximum(_all(FLOAT, -127.0), code.select(code.fcmp_ordered("<", values, high), values, high))
        code.store(code.fptosi(values, ir.VectorType(BYTE, _LANES)), code.at(given["values"], place, BYTE), align=1)

    least = _all(FLOAT, 256 * _TINY)  # a row of zeros would be divided by zero
    (largest,) = code.repeat(given["inputs"], [least], compare, step=_LANES)
    scale = _bfloat16(code, code.fdiv(code.splat(code.largest(largest), _LANES), _all(FLOAT, 127.0)))
    code.store(code.extract_element(scale, _BITS(0)), code.at(given["scales"], row), align=4)
    code.for_each(given["inputs"], divide, step=_LANES)
    code.ret_void()
    return compiled(code.module, optimizes=False)("round")


@cache
def _int4_function(kind: str) -> int:
    """The address of round(arguments, item) for weights in float32 or bfloat16. An item is _LANES * _ITEM groups."""
    code, given, item = item_function(ir.Module("rounding"), "round", _ROUND_GROUPS)
    memory = code.alloca(_GROUPS, INT4_GROUP)
    start, last = code.mul(item, INT(_LANES * _ITEM)), code.sub(given["groups"], INT(_LANES))
    count = code.smaller(code.sub(given["groups"], start), INT(_LANES * _ITEM))

    def round_groups(index: ir.Value) -> None:
        first = code.smaller(code.add(start, index), last)  # some of the last groups are rounded twice
        groups = _Groups(code, memory)
        groups.read(code.at(given["rows"], code.mul(first, INT(INT4_GROUP)), STORED[kind]), kind)
        scale, middle = groups.best()
        groups.write(code.at(given["values"], code.mul(first, INT(INT4_GROUP)), BYTE), scale, middle)
        for name, factors in (("scales", scale), ("middles", middle)):
            bits = code.lshr(code.bitcast(factors, ir.VectorType(_BITS, _LANES)), _all(_BITS, 16))
            code.store(code.trunc(bits, ir.VectorType(_HALF, _LANES)), code.at(given[name], first, _HALF), align=2)

    code.for_each(count, round_groups, step=_LANES)
    code.ret_void()
    return compiled(code.module, optimizes=False)("round")


def _all(kind: ir.Type, value: float) -> ir.Value:
    return ir.Constant(ir.VectorType(kind, _LANES), [value] * _LANES)


def _bfloat16(code: Code, value: ir.Value) -> ir.Value:
    """The nearest values of bfloat16, the even ones of two, of a vector of _LANES."""
    bits = code.bitcast(value, ir.VectorType(_BITS, _LANES))
    up = code.add(_all(_BITS, 0x7FFF), code.and_(code.lshr(bits, _all(_BITS, 16)), _all(_BITS, 1)))
    return code.bitcast(code.and_(code.add(bits, up), _all(_BITS, 0xFFFF0000)), value.type)


def _transposed(code: Code, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """The columns of _LANES vectors of _LANES values."""
    orders = [[lane // 2 + half * _LANES // 2 + lane % 2 * _LANES for lane in range(_LANES)] for half in range(2)]
    for _ in range(_LANES.bit_length() - 1):
        pairs = zip(rows[: _LANES // 2], rows[_LANES // 2 :], strict=True)
        rows = [code.chosen(*pair, order) for pair in pairs for order in orders]
    return [*rows]


_GROUPS = ir.VectorType(FLOAT, _LANES)  # a value of each group


class _Groups:
    """Instructions that round _LANES groups, of which each has a lane. memory: for INT4_GROUP weights of each."""

    def __init__(self, code: Code, memory: ir.Value) -> None:
        self._code, self._memory = code, memory

    def read(self, source: ir.Value, kind: str) -> None:
        """Bring the weights of each group, which lie beside each other, into its lane."""
        code = self._code
        for start in range(0, INT4_GROUP, _LANES):
            places = (code.at(source, INT(group * INT4_GROUP + start), STORED[kind]) for group in range(_LANES))
            rows = [code.floats(place, kind, _LANES) for place in places]
            for index, weights in enumerate(_transposed(code, rows), start=start):
                code.store(weights, code.at(self._memory, INT(index), _GROUPS), align=64)

    def best(self) -> tuple[ir.Value, ir.Value]:
        """The scales and middles."""
        code, first = self._code, self._weights(INT(0))

        def compare(index: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            weights, (low, high, total) = self._weights(index), found
            low = code.select(code.fcmp_ordered("<", weights, low), weights, low)
            return [low, code.maximum(weights, high), code.fadd(total, weights)]

        low, high, total = code.repeat(INT(INT4_GROUP), [first, first, _all(FLOAT, 0.0)], compare)
        span, centre = code.fsub(high, low), code.fmul(code.fadd(low, high), _all(FLOAT, 0.5))
        best = self._fitted(code.fmul(span, _all(FLOAT, 1 / 15)), low)
        for part in _RANGES:
            scale = code.fmul(span, _all(FLOAT, part / 15))
            start = code.fsub(centre, code.fmul(scale, _all(FLOAT, 7.5)))
            other = self._fitted(*self._least_squares(scale, start, centre, total))
            better = code.fcmp_ordered("<", other[2], best[2])
            best = [code.select(better, new, old) for new, old in zip(other, best, strict=True)]
        return best[0], best[1]

    def write(self, target: ir.Value, scale: ir.Value, middle: ir.Value) -> None:
        """Store the integers of each group beside each other."""
        code, (inverse, minimum) = self._code, self._line(scale, middle)
        for start in range(0, INT4_GROUP, _LANES):
            columns = [self._integers(INT(start + index), inverse, minimum) for index in range(_LANES)]
            for group, row in enumerate(_transposed(code, columns)):
                values = code.fptoui(row, ir.VectorType(BYTE, _LANES))
                code.store(values, code.at(target, INT(group * INT4_GROUP + start), BYTE), align=1)

    def _fitted(self, scale: ir.Value, minimum: ir.Value) -> list[ir.Value]:
        """The representable scales and middles next to these, and the squared errors."""
        code = self._code
        scale = _bfloat16(code, code.maximum(scale, _all(FLOAT, _TINY)))
        middle = _bfloat16(code, code.multiply_add(scale, _all(FLOAT, 8.0), minimum))
        inverse, minimum = self._line(scale, middle)

        def add_error(index: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            rounded = code.multiply_add(self._integers(index, inverse, minimum), scale, minimum)
            error = code.fsub(rounded, self._weights(index))
            return [code.multiply_add(error, error, found[0])]

        return [scale, middle, *code.repeat(INT(INT4_GROUP), [_all(FLOAT, 0.0)], add_error)]

    def _least_squares(
        self, scale: ir.Value, minimum: ir.Value, centre: ir.Value, total: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """The scales and minima with which the integers of these are closest to the weights, whose sum is `total`."""
        code, share, zero = self._code, _all(FLOAT, 1 / INT4_GROUP), _all(FLOAT, 0.0)
        inverse = self._inverse(scale)

        def add(index: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            values, (whole, squares, products) = self._integers(index, inverse, minimum), found
            weights = code.fsub(self._weights(index), centre)
            products = code.multiply_add(values, weights, products)
            return [code.fadd(whole, values), code.multiply_add(values, values, squares), products]

        whole, squares, products = code.repeat(INT(INT4_GROUP), [zero] * 3, add)
        middle, mean = code.fmul(whole, share), code.fmul(total, share)
        # Sums of squares and products less those of means. The spread is zero only for constant groups.
        spread = code.maximum(code.fsub(squares, code.fmul(whole, middle)), _all(FLOAT, 1.0))
        moved = code.fsub(total, code.fmul(centre, _all(FLOAT, INT4_GROUP)))
        scale = code.fdiv(code.fsub(products, code.fmul(middle, moved)), spread)
        return scale, code.fsub(mean, code.fmul(scale, middle))

    def _line(self, scale: ir.Value, middle: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The inverse scales and the minima."""
        return self._inverse(scale), self._code.fsub(middle, self._code.fmul(scale, _all(FLOAT, 8.0)))

    def _inverse(self, scale: ir.Value) -> ir.Value:
        return self._code.fdiv(_all(FLOAT, 1.0), self._code.maximum(scale, _all(FLOAT, _TINY)))

    def _integers(self, index: ir.Value, inverse: ir.Value, minimum: ir.Value) -> ir.Value:
        code, highest = self._code, _all(FLOAT, 15.0)
        values = code.nearest(code.fmul(code.fsub(self._weights(index), minimum), inverse))
        values = code.maximum(values, _all(FLOAT, 0.0))
        return code.select(code.fcmp_ordered("<", values, highest), values, highest)

    def _weights(self, index: ir.Value) -> ir.Value:
        """A weight of each group."""
        return self._code.load(self._code.at(self._memory, index, _GROUPS), typ=_GROUPS, align=64)
