"""What a decoder layer computes besides its products, in machine code: norms, rotary positions, activations, attention.

Every function computes one row, or one query of attention, in an order that depends on its own position alone. So its
bits depend neither on the number of rows nor on the number of threads. All tensors are float32.
"""

import math
from collections.abc import Callable
from functools import cache

from llvmlite import ir

from utils.engine.machine_code import FLOAT, INT, POINTER, REASSOCIATED, Code, compiled, new_function, read_words

KEYS_AT_ONCE = 64

NORM = {"x": POINTER, "x_stride": INT, "weight": POINTER, "out": POINTER, "out_stride": INT, "size": INT, "eps": FLOAT}
HEAD_NORM = {"x": POINTER, "x_stride": INT, "weight": POINTER, "heads": INT, "size": INT, "eps": FLOAT}
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


def _load(code: Code, pointer: ir.Value, index: ir.Value) -> ir.Value:
    return code.load(code.at(pointer, index), typ=FLOAT, align=4)


def _store(code: Code, value: ir.Value, pointer: ir.Value, index: ir.Value) -> None:
    code.store(value, code.at(pointer, index), align=4)


def _inlined(module: ir.Module, name: str, kinds: list[ir.Type]) -> tuple[Code, list[ir.Value]]:
    """A function whose pointers do not overlap, so that LLVM uses vectors."""
    code, arguments = new_function(module, name, kinds)
    code.function.linkage = "internal"
    for argument in arguments:
        if argument.type == POINTER:
            argument.add_attribute("noalias")
    return code, arguments


def _add_norm(module: ir.Module) -> None:
    """norm(arguments, row): out = x / sqrt(mean(x^2) + eps) * weight. head_norm does it in place for each head."""
    inner, (x, weight, out, size, eps) = _inlined(module, "norm_of", [POINTER, POINTER, POINTER, INT, FLOAT])
    _write_norm(inner, x, weight, out=out, size=size, eps=eps)
    inner.ret_void()
    code, (pointer, row) = new_function(module, "norm", [POINTER, INT])
    own = read_words(code, pointer, NORM)
    x, out = (code.at(own[name], code.mul(row, own[f"{name}_stride"])) for name in ("x", "out"))
    code.call(inner.function, [x, own["weight"], out, own["size"], own["eps"]])
    code.ret_void()
    code, (pointer, row) = new_function(module, "head_norm", [POINTER, INT])
    own = read_words(code, pointer, HEAD_NORM)
    start = code.at(own["x"], code.mul(row, own["x_stride"]))

    def one(head: ir.Value) -> None:
        part = code.at(start, code.mul(head, own["size"]))
        _write_norm(code, part, own["weight"], out=part, size=own["size"], eps=own["eps"])

    code.for_each(own["heads"], one)
    code.ret_void()


def _write_norm(code: Code, x: ir.Value, weight: ir.Value, *, out: ir.Value, size: ir.Value, eps: ir.Value) -> None:
    def add(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        value = _load(code, x, index)
        return [code.fadd(sums[0], code.fmul(value, value), flags=REASSOCIATED)]

    (squares,) = code.repeat(size, [FLOAT(0.0)], add)
    mean = code.fadd(code.fdiv(squares, code.uitofp(size, FLOAT)), eps)
    factor = code.fdiv(FLOAT(1.0), code.square_root(mean))

    def scale(index: ir.Value) -> None:
        _store(code, code.fmul(code.fmul(_load(code, x, index), factor), _load(code, weight, index)), out, index)

    code.for_each(size, scale)


def _add_add(module: ir.Module) -> None:
    """add(arguments, row): out = x + scale * change. add_in_place: the same for out = x."""
    for name in ("add", "add_in_place"):
        inner, (x, change, out, size, scale) = _inlined(module, f"{name}_row", [POINTER, POINTER, POINTER, INT, FLOAT])
        target = out if name == "add" else x

        def add(index: ir.Value) -> None:
            total = inner.multiply_add(scale, _load(inner, change, index), _load(inner, x, index))  # noqa: B023
            _store(inner, total, target, index)  # noqa: B023

        inner.for_each(size, add)
        inner.ret_void()
        code, (pointer, row) = new_function(module, name, [POINTER, INT])
        own = read_words(code, pointer, ADD)
        place = code.mul(row, own["size"])
        change = code.at(own["change"], code.mul(row, own["change_stride"]))
        rows = [code.at(own["x"], place), change, code.at(own["out"], place)]
        code.call(inner.function, [*rows, own["size"], own["scale"]])
        code.ret_void()


def _add_store(module: ir.Module) -> None:
    """store(arguments, row): copy the keys and values of a row into the cache."""
    inner, (source, target, size) = _inlined(module, "copy", [POINTER, POINTER, INT])
    inner.for_each(size, lambda index: _store(inner, _load(inner, source, index), target, index))
    inner.ret_void()
    code, (pointer, row) = new_function(module, "store", [POINTER, INT])
    own = read_words(code, pointer, STORE)
    keys = code.at(own["x"], code.add(code.mul(row, own["x_stride"]), own["first"]))
    values = code.at(keys, code.mul(own["groups"], own["size"]))
    position = code.mul(code.add(own["past"], row), own["size"])

    def one(group: ir.Value) -> None:
        part, place = code.mul(group, own["size"]), code.add(position, code.mul(group, own["group_stride"]))
        for source, name in ((keys, "keys"), (values, "values")):
            code.call(inner.function, [code.at(source, part), code.at(own[name], place), own["size"]])

    code.for_each(own["groups"], one)
    code.ret_void()


def _add_rotate(module: ir.Module) -> None:
    """rotate(arguments, row): the first values of each head, in halves: y = x * cos + concat(-x2, x1) * sin."""
    inner, (low, high, cos, sin, half) = _inlined(module, "rotate_head", [POINTER, POINTER, POINTER, POINTER, INT])

    def rotate(index: ir.Value) -> None:
        first, second, other = _load(inner, low, index), _load(inner, high, index), inner.add(index, half)
        rotated = inner.fsub(inner.fmul(first, _load(inner, cos, index)), inner.fmul(second, _load(inner, sin, index)))
        crossed = inner.fadd(inner.fmul(second, _load(inner, cos, other)), inner.fmul(first, _load(inner, sin, other)))
        _store(inner, rotated, low, index)
        _store(inner, crossed, high, index)

    inner.for_each(half, rotate)
    inner.ret_void()
    code, (pointer, row) = new_function(module, "rotate", [POINTER, INT])
    own = read_words(code, pointer, ROTATE)
    start, place = code.at(own["x"], code.mul(row, own["x_stride"])), code.mul(row, code.mul(own["half"], INT(2)))
    tables = [code.at(own[name], place) for name in ("cos", "sin")]

    def one(head: ir.Value) -> None:
        low = code.at(start, code.mul(head, own["size"]))
        code.call(inner.function, [low, code.at(low, own["half"]), *tables, own["half"]])

    code.for_each(own["heads"], one)
    code.ret_void()


def _sigmoid(code: Code, x: ir.Value) -> ir.Value:
    return code.fdiv(FLOAT(1.0), code.fadd(FLOAT(1.0), code.exp(code.fneg(x))))


def _tanh_gelu(code: Code, x: ir.Value) -> ir.Value:
    """x * (1 + tanh(u)) / 2 = x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    cube = code.fmul(code.fmul(x, x), x)
    inner = code.fmul(code.multiply_add(FLOAT(0.044715), cube, x), FLOAT(2 * math.sqrt(2 / math.pi)))
    return code.fmul(x, _sigmoid(code, inner))


def _gelu(code: Code, x: ir.Value) -> ir.Value:
    """x * (1 + erf(x / sqrt(2))) / 2, with erf as in Abramowitz and Stegun 7.1.26, whose error is at most 1.5e-7."""
    z = code.fmul(x, FLOAT(math.sqrt(0.5)))
    size = code.select(code.fcmp_ordered("<", z, FLOAT(0.0)), code.fneg(z), z)
    t = code.fdiv(FLOAT(1.0), code.multiply_add(FLOAT(0.3275911), size, FLOAT(1.0)))
    series = FLOAT(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = code.multiply_add(series, t, FLOAT(factor))
    rest = code.fmul(code.fmul(series, t), code.exp(code.fneg(code.fmul(z, z))))  # 1 - erf(|z|)
    whole = code.select(code.fcmp_ordered("<", z, FLOAT(0.0)), rest, code.fsub(FLOAT(2.0), rest))
    return code.fmul(code.fmul(FLOAT(0.5), x), whole)


GATES: dict[str, Callable[[Code, ir.Value], ir.Value]] = {
    "silu": lambda code, x: code.fmul(x, _sigmoid(code, x)),
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu": _gelu,
    "relu": lambda code, x: code.select(code.fcmp_ordered("<", x, FLOAT(0.0)), FLOAT(0.0), x),  # NaN stays NaN
}


def _add_gate(module: ir.Module, name: str) -> None:
    """gate_NAME(arguments, row): out = activation(gate) * up. x: gate and up of each row."""
    inner, (gate, up, out, size) = _inlined(module, f"gated_{name}", [POINTER, POINTER, POINTER, INT])

    def multiply(index: ir.Value) -> None:
        active = GATES[name](inner, _load(inner, gate, index))
        _store(inner, inner.fmul(active, _load(inner, up, index)), out, index)

    inner.for_each(size, multiply)
    inner.ret_void()
    code, (pointer, row) = new_function(module, f"gate_{name}", [POINTER, INT])
    own = read_words(code, pointer, GATE)
    gate, out = code.at(own["x"], code.mul(row, own["x_stride"])), code.at(own["out"], code.mul(row, own["size"]))
    code.call(inner.function, [gate, code.at(gate, own["size"]), out, own["size"]])
    code.ret_void()


@cache
def row_function(name: str) -> int:
    """The address of "norm", "head_norm", "add", "add_in_place", "rotate", "store" or "gate_NAME". Items are rows."""
    return _row_functions()(name)


@cache
def _row_functions() -> Callable[[str], int]:
    module = ir.Module("layers")
    for add in (_add_norm, _add_add, _add_rotate, _add_store):
        add(module)
    for name in GATES:
        _add_gate(module, name)
    return compiled(module)


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
    """The address of causal attention over heads of this size. Items are parts of the queries that share keys.

    Softmax is computed block by block (Milakov and Gimelshein, arXiv 1805.02867).
    """
    module = ir.Module("attention")
    code, (pointer, item) = new_function(module, "attend", [POINTER, INT])
    scores = code.alloca(FLOAT, KEYS_AT_ONCE)
    own = read_words(code, pointer, ATTENTION)
    group, part = code.udiv(item, own["parts"]), code.urem(item, own["parts"])
    first = code.udiv(code.mul(part, own["queries"]), own["parts"])
    last = code.udiv(code.mul(code.add(part, INT(1)), own["queries"]), own["parts"])
    keys, values = (code.at(own[name], code.mul(group, own["group_stride"])) for name in ("keys", "values"))

    def one(index: ir.Value) -> None:
        query = code.add(first, index)
        row, head = code.udiv(query, own["repeats"]), code.urem(query, own["repeats"])
        head = code.add(head, code.mul(group, own["repeats"]))
        start = code.add(code.mul(row, own["query_stride"]), code.mul(head, INT(size)))
        place = code.mul(code.add(code.mul(row, own["heads"]), head), INT(size))
        end = code.add(code.add(own["past"], row), INT(1))
        is_whole = code.or_(
            code.icmp_unsigned("==", own["window"], INT(0)), code.icmp_unsigned("<=", end, own["window"])
        )
        begin = code.select(is_whole, INT(0), code.sub(end, own["window"]))
        _attend(
            code,
            size,
            query=code.at(own["query"], start),
            keys=code.at(keys, code.mul(begin, INT(size))),
            values=code.at(values, code.mul(begin, INT(size))),
            count=code.sub(end, begin),
            scores=scores,
            scaling=own["scaling"],
            out=code.at(own["out"], place),
        )

    code.for_each(code.sub(last, first), one)
    code.ret_void()
    return compiled(module)("attend")


def _vectors(code: Code, pointer: ir.Value, size: int) -> list[ir.Value]:
    return [
        code.load(code.at(pointer, INT(start)), typ=ir.VectorType(FLOAT, lanes), align=4)
        for start, lanes in _chunks(size)
    ]


def _attend(
    code: Code,
    size: int,
    *,
    query: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    count: ir.Value,
    scores: ir.Value,
    scaling: ir.Value,
    out: ir.Value,
) -> None:
    """One query over `count` keys (count, D), a few at a time. scores: scratch memory for KEYS_AT_ONCE values."""
    queries = [code.fmul(part, code.splat(scaling, part.type.count)) for part in _vectors(code, query, size)]
    empty = [ir.Constant(part.type, [0.0] * part.type.count) for part in queries]

    def block(start: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        largest, total, *sums = state
        left, place = code.sub(count, start), code.mul(start, INT(size))
        some = code.smaller(left, INT(KEYS_AT_ONCE))
        highest = _write_scores(code, queries, code.at(keys, place), some, scores=scores, size=size, largest=largest)
        added = _write_weights(code, scores, some, highest)
        correction = code.exp(code.fsub(largest, highest))
        sums = [code.fmul(part, code.splat(correction, part.type.count)) for part in sums]
        sums = _mixed(code, scores, code.at(values, place), some, sums=sums, size=size)
        return [highest, code.multiply_add(total, correction, added), *sums]

    _, total, *sums = code.repeat(count, [FLOAT(float("-inf")), FLOAT(0.0), *empty], block, step=KEYS_AT_ONCE)
    for (start, lanes), part in zip(_chunks(size), sums, strict=True):
        code.store(code.fdiv(part, code.splat(total, lanes)), code.at(out, INT(start)), align=4)


def _write_scores(
    code: Code,
    queries: list[ir.Value],
    keys: ir.Value,
    count: ir.Value,
    *,
    scores: ir.Value,
    size: int,
    largest: ir.Value,
) -> ir.Value:
    """Write the scores of some keys. Returns the largest of them and of those before."""

    def score(index: ir.Value, before: list[ir.Value]) -> list[ir.Value]:
        dots: dict[int, ir.Value] = {}  # by number of lanes
        for query, key in zip(queries, _vectors(code, code.at(keys, code.mul(index, INT(size))), size), strict=True):
            lanes = query.type.count
            dots[lanes] = code.multiply_add(query, key, dots[lanes]) if lanes in dots else code.fmul(query, key)
        result, *others = map(code.total, dots.values())
        for other in others:
            result = code.fadd(result, other)
        _store(code, result, scores, index)
        return [code.maximum(before[0], result)]

    return code.repeat(count, [largest], score)[0]


def _write_weights(code: Code, scores: ir.Value, count: ir.Value, highest: ir.Value) -> ir.Value:
    """Replace scores by exp(score - highest). Returns the sum."""

    def weigh(index: ir.Value, before: list[ir.Value]) -> list[ir.Value]:
        weight = code.exp(code.fsub(_load(code, scores, index), highest))
        _store(code, weight, scores, index)
        return [code.fadd(before[0], weight, flags=REASSOCIATED)]

    return code.repeat(count, [FLOAT(0.0)], weigh)[0]


def _mixed(
    code: Code, weights: ir.Value, values: ir.Value, count: ir.Value, *, sums: list[ir.Value], size: int
) -> list[ir.Value]:
    """Add weighted values (count, D) to sums."""

    def mix(index: ir.Value, before: list[ir.Value]) -> list[ir.Value]:
        weight = _load(code, weights, index)
        parts = _vectors(code, code.at(values, code.mul(index, INT(size))), size)
        return [
            code.multiply_add(code.splat(weight, part.type.count), part, total)
            for part, total in zip(parts, before, strict=True)
        ]

    return code.repeat(count, sums, mix)
