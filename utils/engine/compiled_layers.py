"""What a decoder layer computes besides its products, in machine code: norms, rotary positions, activations, attention.

Every function computes one row, or one query of attention, in an order that depends on its own position alone. So its
bits depend neither on the number of rows nor on the number of threads. All tensors are float32.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

from llvmlite import ir

from utils.engine.machine_code import FLOAT, INT, POINTER, REASSOCIATED, Code, compiled, inner_function, item_function

KEYS_AT_ONCE = 32  # of a block, so that its keys and values stay in the first cache
QUERIES_AT_ONCE = 32  # of a part, at most
_SUMS_AT_ONCE = 4  # vectors of 16 lanes that fit into the registers
_LINE = 16  # values of a cache line
_WORD = ir.IntType(32)

NORM = {"x": POINTER, "x_stride": INT, "weight": POINTER, "out": POINTER, "out_stride": INT}
NORM |= {"heads": INT, "size": INT, "eps": FLOAT}
ADD = {"x": POINTER, "change": POINTER, "change_stride": INT, "out": POINTER, "size": INT, "scale": FLOAT}
# keys and values: (groups, capacity, D), of which `past` positions are known.
CACHE = {"keys": POINTER, "values": POINTER, "group_stride": INT, "past": INT}
STORE = CACHE | {
    "x": POINTER,  # (rows, heads, D), the heads of keys and values last
    "x_stride": INT,
    "first": INT,  # the position in a row of the first key
    "groups": INT,
    "size": INT,
}
ROTATE = {"x": POINTER, "x_stride": INT, "heads": INT, "size": INT, "half": INT, "cos": POINTER, "sin": POINTER}
GATE = {"x": POINTER, "x_stride": INT, "out": POINTER, "size": INT}
ATTENTION = CACHE | {
    "query": POINTER,  # (rows, heads, D)
    "query_stride": INT,  # of a row
    "out": POINTER,  # (rows, heads * D)
    "heads": INT,
    "repeats": INT,  # heads that share keys
    "window": INT,  # 0 for all positions
    "queries": INT,  # rows * repeats of a group
    "parts": INT,  # items of a group
    "scaling": FLOAT,
}

Arguments = dict[str, ir.Value]
Values = Sequence[ir.Value]


def _load(code: Code, pointer: ir.Value, index: ir.Value) -> ir.Value:
    return code.load(code.at(pointer, index), typ=FLOAT, align=4)


def _store(code: Code, value: ir.Value, pointer: ir.Value, index: ir.Value) -> None:
    code.store(value, code.at(pointer, index), align=4)


def _map(code: Code, size: ir.Value, compute: Callable[..., Values], *, reads: Values, writes: Values) -> None:
    """From vectors of the values at each pointer of `reads` to those at each of `writes`, which may be the same."""
    whole = code.and_(size, INT(-_LINE))
    for first, count, lanes in ((INT(0), whole, _LINE), (whole, code.sub(size, whole), 1)):

        def step(index: ir.Value) -> None:
            place, kind = code.add(first, index), ir.VectorType(FLOAT, lanes)  # noqa: B023
            read = [code.load(code.at(pointer, place), typ=kind, align=4) for pointer in reads]
            for value, pointer in zip(compute(*read), writes, strict=True):
                _store(code, value, pointer, place)

        code.for_each(count, step, step=lanes)


def _norm(code: Code, own: Arguments, row: ir.Value) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, for each head."""
    starts, size = [code.at(own[name], code.mul(row, own[f"{name}_stride"])) for name in ("x", "out")], own["size"]

    def one(head: ir.Value) -> None:
        x, out = (code.at(start, code.mul(head, size)) for start in starts)

        def add(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            value = _load(code, x, index)
            return [code.fadd(sums[0], code.fmul(value, value), flags=REASSOCIATED)]

        (squares,) = code.repeat(size, [FLOAT(0.0)], add)
        mean = code.fadd(code.fdiv(squares, code.uitofp(size, FLOAT)), own["eps"])
        factor = code.fdiv(FLOAT(1.0), code.square_root(mean))

        def scale(x: ir.Value, weight: ir.Value) -> list[ir.Value]:
            return [code.fmul(code.fmul(x, code.splat(factor, x.type.count)), weight)]

        _map(code, size, scale, reads=[x, own["weight"]], writes=[out])

    code.for_each(own["heads"], one)


def _add(code: Code, own: Arguments, row: ir.Value) -> None:
    """out = x + scale * change."""
    place, change = code.mul(row, own["size"]), code.at(own["change"], code.mul(row, own["change_stride"]))

    def add(x: ir.Value, change: ir.Value) -> list[ir.Value]:
        return [code.multiply_add(code.splat(own["scale"], x.type.count), change, x)]

    _map(code, own["size"], add, reads=[code.at(own["x"], place), change], writes=[code.at(own["out"], place)])


def _store_keys(code: Code, own: Arguments, row: ir.Value) -> None:
    """Copy the keys and values of a row into the cache."""
    keys = code.at(own["x"], code.add(code.mul(row, own["x_stride"]), own["first"]))
    sources = [keys, code.at(keys, code.mul(own["groups"], own["size"]))]
    position = code.mul(code.add(own["past"], row), own["size"])

    def one(group: ir.Value) -> None:
        part, place = code.mul(group, own["size"]), code.add(position, code.mul(group, own["group_stride"]))
        targets = [code.at(own[name], place) for name in ("keys", "values")]
        _map(code, own["size"], lambda *both: both, reads=[code.at(each, part) for each in sources], writes=targets)

    code.for_each(own["groups"], one)


def _rotate(code: Code, own: Arguments, row: ir.Value) -> None:
    """The first values of each head, in halves: y = x * cos + concat(-x2, x1) * sin."""
    start, half = code.at(own["x"], code.mul(row, own["x_stride"])), own["half"]
    first = code.mul(row, code.mul(half, INT(2)))
    tables = [code.at(own[name], place) for place in (first, code.add(first, half)) for name in ("cos", "sin")]

    def rotate(low: ir.Value, high: ir.Value, *factors: ir.Value) -> list[ir.Value]:
        cos, sin, other_cos, other_sin = factors
        rotated = code.fsub(code.fmul(low, cos), code.fmul(high, sin))
        return [rotated, code.fadd(code.fmul(high, other_cos), code.fmul(low, other_sin))]

    def one(head: ir.Value) -> None:
        low = code.at(start, code.mul(head, own["size"]))
        halves = [low, code.at(low, half)]
        _map(code, half, rotate, reads=[*halves, *tables], writes=halves)

    code.for_each(own["heads"], one)


def _sigmoid(code: Code, x: ir.Value) -> ir.Value:
    one = code.like(x, 1.0)
    return code.fdiv(one, code.fadd(one, code.exp(code.fneg(x))))


def _tanh_gelu(code: Code, x: ir.Value) -> ir.Value:
    """x * (1 + tanh(u)) / 2 = x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    cube = code.fmul(code.fmul(x, x), x)
    inner = code.multiply_add(code.like(x, 0.044715), cube, x)
    return code.fmul(x, _sigmoid(code, code.fmul(inner, code.like(x, 2 * math.sqrt(2 / math.pi)))))


def _gelu(code: Code, x: ir.Value) -> ir.Value:
    """x * (1 + erf(x / sqrt(2))) / 2, with erf as in Abramowitz and Stegun 7.1.26, whose error is at most 1.5e-7."""
    z, one = code.fmul(x, code.like(x, math.sqrt(0.5))), code.like(x, 1.0)
    is_negative = code.fcmp_ordered("<", z, code.like(x, 0.0))
    t = code.fdiv(one, code.multiply_add(code.like(x, 0.3275911), code.select(is_negative, code.fneg(z), z), one))
    series = code.like(x, 1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = code.multiply_add(series, t, code.like(x, factor))
    rest = code.fmul(code.fmul(series, t), code.exp(code.fneg(code.fmul(z, z))))  # 1 - erf(|z|)
    whole = code.select(is_negative, rest, code.fsub(code.like(x, 2.0), rest))
    return code.fmul(code.fmul(code.like(x, 0.5), x), whole)


def _relu(code: Code, x: ir.Value) -> ir.Value:
    zero = code.like(x, 0.0)
    return code.select(code.fcmp_ordered("<", x, zero), zero, x)  # NaN stays NaN


GATES: dict[str, Callable[[Code, ir.Value], ir.Value]] = {
    "silu": lambda code, x: code.fmul(x, _sigmoid(code, x)),
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu": _gelu,
    "relu": _relu,
}


def _gate(code: Code, own: Arguments, row: ir.Value, *, activation: Callable[[Code, ir.Value], ir.Value]) -> None:
    """out = activation(gate) * up. x: gate and up of each row."""
    gate, out = code.at(own["x"], code.mul(row, own["x_stride"])), code.at(own["out"], code.mul(row, own["size"]))
    reads = [gate, code.at(gate, own["size"])]
    _map(code, own["size"], lambda gate, up: [code.fmul(activation(code, gate), up)], reads=reads, writes=[out])


_ROWS: dict[str, tuple[dict[str, ir.Type], Callable[[Code, Arguments, ir.Value], None]]] = {
    "norm": (NORM, _norm),
    "add": (ADD, _add),
    "store": (STORE, _store_keys),
    "rotate": (ROTATE, _rotate),
    **{f"gate_{name}": (GATE, partial(_gate, activation=function)) for name, function in GATES.items()},
}


@cache
def row_function(name: str) -> int:
    """The address of a function (arguments, row) of _ROWS."""
    kinds, write = _ROWS[name]
    code, own, row = item_function(ir.Module("layers"), name, kinds)
    write(code, own, row)
    code.ret_void()
    return compiled(code.module, optimizes=write is _norm)(name)  # the others are vectors already


def _chunks(size: int) -> list[tuple[int, int]]:
    """(start, lanes) of vectors that cover a head."""
    chunks, start = [], 0
    for lanes in (16, 8, 4, 2, 1):
        while size - start >= lanes:
            chunks.append((start, lanes))
            start += lanes
    return chunks


@cache
def attention_function(size: int) -> int:
    """The address of causal attention over heads of this size. Items are parts of the queries that share keys, at most
    QUERIES_AT_ONCE in each.

    Keys and values are read a block after the other, each for all queries of a part, so that they come from memory
    once. Softmax is computed block by block (Milakov and Gimelshein, arXiv 1805.02867). Blocks begin at multiples of
    KEYS_AT_ONCE, so that the bits of a query do not depend on the others.
    """
    module = ir.Module("attention")
    _Attention(module, size).write()
    return compiled(module)("attend")


class _Attention:
    """attend(arguments, item). Queries are numbered within the item's part."""

    def __init__(self, module: ir.Module, size: int) -> None:
        # The first query of a part asks memory for what the others read as well.
        self._updates = [_Update(module, size, streams=streams).write() for streams in (True, False)]
        self._code, self._own, item = item_function(module, "attend", ATTENTION)
        self._size, code = size, self._code
        self._totals, self._scores = code.alloca(FLOAT, 2 * QUERIES_AT_ONCE), code.alloca(FLOAT, KEYS_AT_ONCE)
        parts, queries = self._own["parts"], self._own["queries"]
        self._group, part = code.udiv(item, parts), code.urem(item, parts)
        self._first = code.udiv(code.mul(part, queries), parts)
        end = code.udiv(code.mul(code.add(part, INT(1)), queries), parts)
        self._count = code.sub(end, self._first)

    def write(self) -> None:
        code, count, block = self._code, self._count, INT(KEYS_AT_ONCE)
        code.for_each(count, self._begin)
        first = code.udiv(self._positions(INT(0))[0], block)
        end = self._positions(code.sub(count, INT(1)))[1]
        blocks = code.sub(code.udiv(code.add(end, INT(KEYS_AT_ONCE - 1)), block), first)
        code.for_each(blocks, lambda index: self._attend(code.mul(code.add(first, index), block)))
        code.for_each(count, self._finish)
        code.ret_void()

    def _row_and_head(self, index: ir.Value) -> tuple[ir.Value, ir.Value]:
        code, repeats = self._code, self._own["repeats"]
        query = code.add(self._first, index)
        return code.udiv(query, repeats), code.add(code.urem(query, repeats), code.mul(self._group, repeats))

    def _out(self, index: ir.Value) -> ir.Value:
        row, head = self._row_and_head(index)
        place = self._code.add(self._code.mul(row, self._own["heads"]), head)
        return self._code.at(self._own["out"], self._code.mul(place, INT(self._size)))

    def _positions(self, index: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The first position that a query attends to, and the one after its last."""
        code, window = self._code, self._own["window"]
        end = code.add(code.add(self._own["past"], self._row_and_head(index)[0]), INT(1))
        is_whole = code.or_(code.icmp_unsigned("==", window, INT(0)), code.icmp_unsigned("<=", end, window))
        return code.select(is_whole, INT(0), code.sub(end, window)), end

    def _begin(self, index: ir.Value) -> None:
        code, place = self._code, self._code.mul(index, INT(2))
        _store(code, FLOAT(float("-inf")), self._totals, place)
        _store(code, FLOAT(0.0), self._totals, code.add(place, INT(1)))
        for start, lanes in _chunks(self._size):
            nothing = ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)
            code.store(nothing, code.at(self._out(index), INT(start)), align=4)

    def _attend(self, start: ir.Value) -> None:
        """Let all queries attend to the keys of the block from `start`."""
        code, own, size = self._code, self._own, INT(self._size)

        def one(index: ir.Value) -> None:
            low, high = self._positions(index)
            low = code.select(code.icmp_unsigned("<", low, start), start, low)
            high = code.smaller(high, code.add(start, INT(KEYS_AT_ONCE)))
            with code.if_then(code.icmp_unsigned("<", low, high)):
                row, head = self._row_and_head(index)
                query = code.at(own["query"], code.add(code.mul(row, own["query_stride"]), code.mul(head, size)))
                place = code.add(code.mul(self._group, own["group_stride"]), code.mul(low, size))
                keys, values = (code.at(own[name], place) for name in ("keys", "values"))
                state = [code.at(self._totals, code.mul(index, INT(2))), self._out(index), self._scores]
                arguments = [query, keys, values, code.sub(high, low), own["scaling"], *state]
                with code.if_else(code.icmp_unsigned("==", index, INT(0))) as branches:
                    for update, branch in zip(self._updates, branches, strict=True):
                        with branch:
                            code.call(update, arguments)

        code.for_each(self._count, one)

    def _finish(self, index: ir.Value) -> None:
        code, out = self._code, self._out(index)
        total = _load(code, self._totals, code.add(code.mul(index, INT(2)), INT(1)))
        for (start, lanes), part in zip(_chunks(self._size), _vectors(code, out, _chunks(self._size)), strict=True):
            code.store(code.fdiv(part, code.splat(total, lanes)), code.at(out, INT(start)), align=4)


def _vectors(code: Code, pointer: ir.Value, chunks: Sequence[tuple[int, int]]) -> list[ir.Value]:
    kinds = [(code.at(pointer, INT(start)), ir.VectorType(FLOAT, lanes)) for start, lanes in chunks]
    return [code.load(place, typ=kind, align=4) for place, kind in kinds]


class _Update:
    """update(query, keys, values, count, scaling, totals, sums, scores): let a query attend to some more keys.

    keys, values: (count, D). totals: the largest score so far, and the sum of exp(score - largest). sums: (D,), those
    of the values with these weights. scores: scratch memory for KEYS_AT_ONCE values.
    """

    def __init__(self, module: ir.Module, size: int, *, streams: bool) -> None:
        """streams: ask memory for the values while scores are computed, and for the next keys afterwards."""
        kinds = [POINTER, POINTER, POINTER, INT, FLOAT, POINTER, POINTER, POINTER]
        self._code, arguments = inner_function(module, "update_first" if streams else "update", kinds)
        self._query, self._keys, self._values, self._count, self._scaling, *rest = arguments
        self._totals, self._sums, self._scores = rest
        self._size, self._streams = size, streams

    def write(self) -> ir.Function:
        code, totals, chunks = self._code, self._totals, _chunks(self._size)
        before = _load(code, totals, INT(0))
        highest = self._write_scores(before)
        added, correction = self._write_weights(highest), code.exp(code.fsub(before, highest))
        _store(code, highest, totals, INT(0))
        _store(code, code.multiply_add(_load(code, totals, INT(1)), correction, added), totals, INT(1))
        for first in range(0, len(chunks), _SUMS_AT_ONCE):
            self._add_values(chunks[first : first + _SUMS_AT_ONCE], correction)
        code.ret_void()
        return code.function

    def _row(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return self._code.at(pointer, self._code.mul(index, INT(self._size)))

    def _write_scores(self, largest: ir.Value) -> ir.Value:
        """Write the scores of the keys. Returns the largest of them and of those before."""
        code, query = self._code, _vectors(self._code, self._query, _chunks(self._size))
        query = [code.fmul(part, code.splat(self._scaling, part.type.count)) for part in query]
        last = code.sub(self._count, INT(1))

        def score_four(index: ir.Value, before: list[ir.Value]) -> list[ir.Value]:
            for place in range(0, 4 * self._size if self._streams else 0, _LINE):
                code.prefetch(code.at(self._row(self._values, index), INT(place)))
            # Behind the last key, its score is written again.
            parts = [self._products(query, code.smaller(code.add(index, INT(place)), last)) for place in range(4)]
            result = _halves_added(code, *(_halves_added(code, *two, step=2) for two in (parts[:2], parts[2:])), step=1)
            code.store(result, code.at(self._scores, index), align=4)
            return [code.maximum(before[0], result)]

        (four,) = code.repeat(self._count, [code.splat(largest, 4)], score_four, step=4)
        for half in ([0, 1], [2, 3]), ([0], [1]):
            four = code.maximum(*(code.chosen(four, four, places) for places in half))
        return code.extract_element(four, _WORD(0))

    def _products(self, query: list[ir.Value], index: ir.Value) -> ir.Value:
        """Four lanes whose sum is the score of a key."""
        code, sums = self._code, dict[int, ir.Value]()  # by number of lanes
        for part, key in zip(query, _vectors(code, self._row(self._keys, index), _chunks(self._size)), strict=True):
            lanes = part.type.count
            sums[lanes] = code.multiply_add(part, key, sums[lanes]) if lanes in sums else code.fmul(part, key)
        result, *others = (_four_lanes(code, part) for part in sums.values())
        for other in others:
            result = code.fadd(result, other)
        return result

    def _write_weights(self, highest: ir.Value) -> ir.Value:
        """Replace scores by exp(score - highest). Returns the sum."""
        code = self._code

        def weigh(index: ir.Value, before: list[ir.Value]) -> list[ir.Value]:
            weight = code.exp(code.fsub(_load(code, self._scores, index), highest))
            _store(code, weight, self._scores, index)
            return [code.fadd(before[0], weight, flags=REASSOCIATED)]

        return code.repeat(self._count, [FLOAT(0.0)], weigh)[0]

    def _add_values(self, chunks: list[tuple[int, int]], correction: ir.Value) -> None:
        """Multiply chunks of the sums with the correction, and add weighted values to them."""
        code = self._code

        def mix(index: ir.Value, before: list[ir.Value]) -> list[ir.Value]:
            for start, _ in chunks if self._streams else []:
                code.prefetch(code.at(self._row(self._keys, code.add(self._count, index)), INT(start)))
            weight, parts = _load(code, self._scores, index), _vectors(code, self._row(self._values, index), chunks)
            return [
                code.multiply_add(code.splat(weight, part.type.count), part, total)
                for part, total in zip(parts, before, strict=True)
            ]

        sums = _vectors(code, self._sums, chunks)
        totals = [code.fmul(part, code.splat(correction, part.type.count)) for part in sums]
        for (start, _), part in zip(chunks, code.repeat(self._count, totals, mix), strict=True):
            code.store(part, code.at(self._sums, INT(start)), align=4)


def _four_lanes(code: Code, x: ir.Value) -> ir.Value:
    """Four lanes whose sum is that of a vector."""
    lanes = x.type.count
    if lanes > 4:
        halves = (code.chosen(x, x, [*range(start, start + lanes // 2)]) for start in (0, lanes // 2))
        return _four_lanes(code, code.fadd(*halves))
    return x if lanes == 4 else code.chosen(x, code.like(x, 0.0), [*range(lanes), *[lanes] * (4 - lanes)])


def _halves_added(code: Code, first: ir.Value, second: ir.Value, *, step: int) -> ir.Value:
    """Four lanes: in two vectors of four, each lane and the one `step` after it are added. So two steps of 2 and then
    1 make the sums of four vectors, in one order for each.
    """
    left = [0, 1, 4, 5] if step == 2 else [0, 2, 4, 6]
    right = [place + step for place in left]
    return code.fadd(code.chosen(first, second, left), code.chosen(first, second, right))
