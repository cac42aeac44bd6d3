"""Products with packed weights in machine code.

A weight (N, K) is stored in blocks of LANES outputs. For each input in turn, one value of every output of a block is
multiplied with the inputs of all rows and added to their sums. So the weights are read once for all rows, and every
sum is formed in the order of the inputs: its bits depend neither on the number of rows nor on the number of threads.
The tiles of sums in registers follow Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
Weights are unpacked in registers: bfloat16, and small integers with a scale for each group of inputs.

Where the processor multiplies bytes and adds four products at once (VNNI), inputs that meet small integers are rounded
to 16 bits, with a scale for up to 64 of them, and are multiplied as two bytes. Sums of integers are exact.
"""

from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from utils.engine.machine_code import (
    BYTE,
    FLOAT,
    INT,
    POINTER,
    Code,
    compiled,
    cpu_features,
    has_dot,
    inner_function,
    item_function,
)

LANES = 16  # outputs of a block
_FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(ir.IntType(32), LANES)
_WORD, _ZERO = ir.IntType(32), ir.Constant(_FLOATS, [0.0] * LANES)
_LARGEST = 127 * 256.0  # of rounded inputs
_LEAST = 1e-30  # inputs of a group without larger ones may become zero
_PACKED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "uint8": 1.0, "uint4": 0.5}  # of a value
_ROUNDED_AT_ONCE = (64, 32, 16, 8, 4)  # inputs with one scale, of which a group must have a multiple
_TILE_ARGUMENTS = {
    "x": POINTER,  # (rows, K), prepared for the form
    "steps": POINTER,  # of rounded inputs: (rows, K / rounded, 2), the scale and where the sum of integers starts
    "values": POINTER,
    "scales": POINTER,
    "shifts": POINTER,
    "bias": POINTER,
    "sums": POINTER,  # of the inputs of each group: (rows, K / group)
    "out": POINTER,
    "out_stride": INT,
    "groups": INT,
    "last": INT,  # the last block that there is. A tile with more blocks computes it several times
    "ahead": POINTER,  # weights that are prefetched meanwhile, those of the first block
    "share": INT,  # how many: one of 2^share parts of each block
}
ARGUMENTS = _TILE_ARGUMENTS | {"inputs": POINTER, "blocks": INT, "rows": INT, "tile": INT, "span": INT}
PREPARED = ("x", "steps", "sums")  # what is in scratch memory
IN_WORD = 8  # values of 4 bits, of adjacent inputs
DOT = 4  # products of bytes that are added at once


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How values are stored. kind: a key of _PACKED_BYTES. inputs: K. group: inputs that share a scale, 0 without
    scales. scales: the number format of scales and shifts. offset: as in BlockWeight. rounded: inputs that are rounded
    to 16 bits with one scale, 0 if they are computed in float32.
    """

    kind: str
    inputs: int
    group: int = 0
    scales: str = "float32"
    offset: int = 0
    has_shifts: bool = False
    has_bias: bool = False
    rounded: int = 0

    @property
    def is_grouped(self) -> bool:
        """Whether an output has several scales."""
        return 0 < self.group < self.inputs

    @property
    def adds_sums(self) -> bool:
        """Whether sums of inputs are needed."""
        return self.has_shifts or (self.offset != 0 and not self.rounded)

    @property
    def x_bytes(self) -> int:
        """Bytes of an input: its two bytes, the high ones of DOT inputs before their low ones, or a float."""
        return 2 if self.rounded else 4

    @property
    def in_word(self) -> int:
        """Inputs whose values are stored beside each other, of one output after the other."""
        return IN_WORD if self.kind == "uint4" else DOT if self.rounded else 1

    @property
    def start(self) -> int:
        """What is added to values before they meet rounded inputs, which takes unsigned ones."""
        return self.offset - (128 if self.kind == "int8" else 0)

    @property
    def is_prepared(self) -> bool:
        """Whether inputs are prepared before products."""
        return self.adds_sums or self.in_word > 1

    def prepared(self, rows: int) -> list[int]:
        """Sizes of what is prepared for so many rows, in values of 4 bytes, in the order of PREPARED."""
        sums = rows * self.inputs // self.group if self.adds_sums else 0
        if self.rounded:
            return [rows * self.inputs // 2, 2 * rows * self.inputs // self.rounded, sums]
        return [rows * self.inputs if self.kind == "uint4" else 0, 0, sums]


def _vector(code: Code, pointer: ir.Value, kind: ir.Type) -> ir.Value:
    return code.load(pointer, typ=ir.VectorType(kind, LANES), align=1)


def _packed(code: Code, form: PackedForm, pointer: ir.Value) -> ir.Value:
    """The values of one input, or those of a word of inputs."""
    kinds = {"float32": FLOAT, "bfloat16": ir.IntType(16)}
    return _vector(code, pointer, kinds.get(form.kind, ir.IntType(32) if form.in_word > 1 else BYTE))


def _factors(code: Code, form: PackedForm, own: dict[str, ir.Value], place: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The scales and shifts of a group of each output, the offset included. place: of their first."""
    kind = {"float32": FLOAT, "bfloat16": ir.IntType(16), "float16": ir.HalfType()}[form.scales]

    def read(name: str) -> ir.Value:
        stored = _vector(code, code.at(own[name], place, kind), kind)
        if form.scales == "float16":
            return code.fpext(stored, _FLOATS)
        return code.widened(stored) if form.scales == "bfloat16" else stored

    scale = read("scales")
    shift = read("shifts") if form.has_shifts else _ZERO
    if form.offset and not form.rounded:
        shift = code.multiply_add(scale, ir.Constant(_FLOATS, [float(form.offset)] * LANES), shift)
    return scale, shift


def _unpacked(code: Code, form: PackedForm, packed: ir.Value, place: int) -> ir.Value:
    """The values of one input as float32. In 4 bits value i of a word is times 16^i, because it stays where it is;
    `_scales_of_word` are the inverses for the inputs.
    """
    if form.kind == "float32":
        return packed
    if form.kind == "bfloat16":
        return code.widened(packed)
    if form.kind == "uint4":
        if place == IN_WORD - 1:  # shifted, so that the sign stays zero
            packed, place = code.lshr(packed, ir.Constant(WORDS, [4] * LANES)), place - 1
        packed = code.and_(packed, ir.Constant(WORDS, [15 << 4 * place] * LANES))
    return code.uitofp(packed, _FLOATS) if form.kind == "uint8" else code.sitofp(packed, _FLOATS)


def _unsigned_bytes(code: Code, form: PackedForm, packed: ir.Value) -> list[ir.Value]:
    """The values of a word of inputs as unsigned bytes, those of DOT inputs in each vector."""
    if form.kind == "uint4":
        halves = (packed, code.lshr(packed, ir.Constant(WORDS, [4] * LANES)))
        return [code.and_(half, ir.Constant(WORDS, [0x0F0F0F0F] * LANES)) for half in halves]
    return [code.xor(packed, ir.Constant(WORDS, [0x80808080] * LANES)) if form.kind == "int8" else packed]


def _scales_of_word() -> list[float]:
    """What inputs are multiplied with before they meet the values of 4 bits. Powers of two change no bits."""
    return [16.0 ** -min(place, IN_WORD - 2) for place in range(IN_WORD)]


class _Tile:
    """The product of some rows with the outputs of adjacent blocks. Sums are numbered block by block, row by row.

    Pointers are those of the first row and block.
    """

    def __init__(self, module: ir.Module, form: PackedForm, rows: int, blocks: int, *, streams: bool = True) -> None:
        # One or two rows keep memory busy without asking early, but not on processors with AVX-512.
        self._streams = streams and (rows > 2 or _has_many_registers())
        self._code, arguments = inner_function(module, f"tile_{rows}_{blocks}", [*_TILE_ARGUMENTS.values()])
        self._form, self._rows = form, rows
        self._given = dict(zip(_TILE_ARGUMENTS, arguments, strict=True))
        places = [self._code.smaller(INT(block), self._given["last"]) for block in range(blocks)]
        self._blocks = [_of_block(self._code, form, self._given, place) for place in places]
        width = form.x_bytes * form.inputs
        self._inputs = [self._code.at(self._given["x"], INT(row * width), BYTE) for row in range(rows)]
        self._zeros = [_ZERO] * (rows * blocks)
        self._size, self._at_once = form.group or form.inputs, form.in_word
        self._stride = int(LANES * self._at_once * _PACKED_BYTES[form.kind])  # bytes from one step to the next

    def write(self) -> ir.Function:
        code, groups = self._code, self._given["groups"]
        totals = code.repeat(groups, self._zeros, self._add_group) if self._form.group else self._group_sums(INT(0))
        for place, total in enumerate(totals):
            own, row = self._blocks[place // self._rows], place % self._rows
            total = code.fadd(total, _vector(code, own["bias"], FLOAT)) if self._form.has_bias else total
            code.store(total, code.at(own["out"], code.mul(self._given["out_stride"], INT(row))), align=4)
        code.ret_void()
        return code.function

    def _add_group(self, group: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        """Add the sums of a group times its scale, and the sum of its inputs times its shift."""
        code, sums, position = self._code, self._group_sums(group), self._code.mul(group, INT(LANES))
        factors = [_factors(code, self._form, own, position) for own in self._blocks]
        for place, part in enumerate(sums):
            (scale, shift), row = factors[place // self._rows], place % self._rows
            totals[place] = code.multiply_add(part, scale, totals[place])
            if self._form.adds_sums:
                index = code.add(group, code.mul(self._given["groups"], INT(row)))
                total = code.load(code.at(self._given["sums"], index), typ=FLOAT, align=4)
                totals[place] = code.multiply_add(code.splat(total, LANES), shift, totals[place])
        return totals

    def _group_sums(self, group: ir.Value) -> list[ir.Value]:
        """The sums of a group of inputs."""
        code, form = self._code, self._form
        first = code.mul(group, INT(self._size))
        if not form.rounded:
            return self._sums_of_floats(first)
        if form.rounded == self._size:
            return self._sums_of_integers(first, self._zeros)
        return code.repeat(
            INT(self._size),
            self._zeros,
            lambda index, sums: self._sums_of_integers(code.add(first, index), sums),
            step=form.rounded,
        )

    def _sums_of_floats(self, first: ir.Value) -> list[ir.Value]:
        """The sums of a group of inputs from the first one on."""
        code, inputs = self._code, [self._code.at(pointer, first, FLOAT) for pointer in self._inputs]

        def add(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            packed = self._next_weights(code.add(first, index))
            for each in range(self._at_once):
                values = [_unpacked(code, self._form, part, each) for part in packed]
                for row, pointer in enumerate(inputs):
                    x = code.splat(code.load(code.at(pointer, code.add(index, INT(each))), typ=FLOAT, align=4), LANES)
                    for place in range(row, len(sums), self._rows):
                        sums[place] = code.multiply_add(x, values[place // self._rows], sums[place])
            return sums

        return code.repeat(INT(self._size), self._zeros, add, step=self._at_once)

    def _sums_of_integers(self, first: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """The sums, and those of the inputs that share a scale with the first one."""
        code, form = self._code, self._form
        kinds, scales, starts = (FLOAT, ir.IntType(32)), list[ir.Value](), list[ir.Value]()
        for row in range(self._rows):
            place = code.add(code.udiv(first, INT(form.rounded)), INT(row * form.inputs // form.rounded))
            for index, (kind, found) in enumerate(zip(kinds, (scales, starts), strict=True)):
                pointer = code.at(self._given["steps"], code.add(code.mul(place, INT(2)), INT(index)))
                found.append(code.splat(code.load(pointer, typ=kind, align=4), LANES))
        inputs = [code.at(pointer, code.mul(first, INT(2)), BYTE) for pointer in self._inputs]

        def add(index: ir.Value, integers: list[ir.Value]) -> list[ir.Value]:
            packed = [_unsigned_bytes(code, form, part) for part in self._next_weights(code.add(first, index))]
            for part in range(self._at_once // DOT):
                for row, pointer in enumerate(inputs):
                    place = code.at(pointer, code.mul(code.add(index, INT(part * DOT)), INT(2)), BYTE)
                    for low in (0, 1):
                        byte = code.load(code.at(place, INT(low * DOT), BYTE), typ=_WORD, align=4)
                        x = code.splat(byte, LANES)
                        for total in range(row, len(sums), self._rows):
                            own = low * len(sums) + total
                            integers[own] = code.dot(integers[own], packed[total // self._rows][part], x)
            return integers

        zeros = [ir.Constant(WORDS, [0] * LANES)] * len(sums)
        integers = [*zeros, *(starts[total % self._rows] for total in range(len(sums)))]
        integers = code.repeat(INT(form.rounded), integers, add, step=self._at_once)
        shift, totals = ir.Constant(WORDS, [8] * LANES), list[ir.Value]()
        for total, (high, low) in enumerate(zip(integers[: len(sums)], integers[len(sums) :], strict=True)):
            whole = code.sitofp(code.add(code.shl(high, shift), low), _FLOATS)
            totals.append(code.multiply_add(whole, scales[total % self._rows], sums[total]))
        return totals

    def _next_weights(self, index: ir.Value) -> list[ir.Value]:
        """The values of a word of inputs from `index` on, of each block. Later ones are prefetched."""
        code = self._code
        place = code.mul(code.udiv(index, INT(self._at_once)), INT(self._stride))
        if self._streams:
            ahead = code.at(self._given["ahead"], code.lshr(place, self._given["share"]), BYTE)
            for block in range(len(self._blocks)):
                code.prefetch(code.at(ahead, INT(block * _block_bytes(self._form)), BYTE))
        return [_packed(code, self._form, code.at(own["values"], place, BYTE)) for own in self._blocks]


def _block_bytes(form: PackedForm) -> int:
    return int(LANES * form.inputs * _PACKED_BYTES[form.kind])


def _of_block(code: Code, form: PackedForm, given: dict[str, ir.Value], block: ir.Value) -> dict[str, ir.Value]:
    """The arguments of a block. The first block is that of the given ones."""
    place, outputs = code.mul(code.mul(block, given["groups"]), INT(LANES)), code.mul(block, INT(LANES))
    values = code.mul(block, INT(_block_bytes(form)))
    kind = FLOAT if form.scales == "float32" else ir.IntType(16)
    return given | {
        "values": code.at(given["values"], values, BYTE),
        "scales": code.at(given["scales"], place, kind),
        "shifts": code.at(given["shifts"], place, kind),
        "bias": code.at(given["bias"], outputs),
        "out": code.at(given["out"], outputs),
    }


def _blocks_of(code: Code, given: dict[str, ir.Value], item: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The first block of an item, and how many it has."""
    first = code.mul(item, given["span"])
    return first, code.smaller(code.sub(given["blocks"], first), given["span"])


def _add_block_function(module: ir.Module, form: PackedForm) -> None:
    """block(arguments, item): the product of all rows with `span` blocks, several at once."""
    shapes = {
        blocks: {rows: _Tile(module, form, rows, blocks).write() for rows in range(1, most + 1)}
        for blocks, most in tile_shapes(form).items()
    }
    code, given, item = item_function(module, "block", ARGUMENTS)
    first, count = _blocks_of(code, given, item)
    after = code.append_basic_block()
    for at_once, tiles in shapes.items():

        def compute(index: ir.Value) -> None:
            own = _of_block(code, form, given, code.add(first, index))
            own["last"] = code.sub(code.sub(count, index), INT(1))
            _compute_tiles(code, form, tiles, own=own, at_once=at_once)  # noqa: B023

        with code.if_then(code.icmp_unsigned("<=", given["tile"], INT(len(tiles)))):
            code.for_each(count, compute, step=at_once)
            code.branch(after)
    code.branch(after)
    code.position_at_end(after)
    code.ret_void()


def _compute_tiles(
    code: Code, form: PackedForm, tiles: dict[int, ir.Function], *, own: dict[str, ir.Value], at_once: int
) -> None:
    """The product of all rows with the blocks of a tile, in tiles of rows."""

    count_of_tiles = code.udiv(code.add(own["rows"], code.sub(own["tile"], INT(1))), own["tile"])
    # While blocks are computed, the next ones are brought from memory: by each tile of rows a part.
    size = _block_bytes(form)
    is_one, are_two = (code.icmp_unsigned("<=", count_of_tiles, INT(count)) for count in (1, 2))
    share = code.select(is_one, INT(0), code.select(are_two, INT(1), INT(2)))
    near = min(size, _near_bytes(form.kind) or size)
    next_block = code.at(own["values"], code.select(is_one, INT(near), INT(size * at_once)), BYTE)

    def compute_tile(index: ir.Value) -> None:
        first = code.mul(index, own["tile"])
        part = own | {
            "ahead": code.at(next_block, code.mul(index, code.lshr(INT(size), share)), BYTE),
            "share": share,
            "x": code.at(own["x"], code.mul(first, INT(form.x_bytes * form.inputs)), BYTE),
            "steps": code.at(own["steps"], code.mul(first, INT(2 * form.inputs // (form.rounded or form.inputs)))),
            "sums": code.at(own["sums"], code.mul(first, own["groups"])),
            "out": code.at(own["out"], code.mul(first, own["out_stride"])),
        }
        count = code.smaller(code.sub(own["rows"], first), own["tile"])
        after = code.append_basic_block()
        switch = code.switch(count, after)
        for rows, tile in tiles.items():
            case = code.append_basic_block()
            switch.add_case(INT(rows), case)
            code.position_at_end(case)
            code.call(tile, [part[name] for name in _TILE_ARGUMENTS])
            code.branch(after)
        code.position_at_end(after)

    code.for_each(count_of_tiles, compute_tile)


@cache
def wide_function(form: PackedForm) -> int:
    """The address of wide(arguments, item): like `block`, for so many rows that it pays to unpack values to memory
    first. Rounding differs from that of `block`. sums: memory for a block of float32 values of each item.
    """
    module, plain = ir.Module("wide"), PackedForm("float32", form.inputs, has_bias=form.has_bias)
    tiles = {rows: _Tile(module, plain, rows, 1, streams=False).write() for rows in range(1, most_rows(plain) + 1)}
    code, given, item = item_function(module, "wide", ARGUMENTS)
    memory = code.at(given["sums"], code.mul(item, INT(form.inputs * LANES)))
    first, count = _blocks_of(code, given, item)

    def compute(index: ir.Value) -> None:
        own = _of_block(code, form, given, code.add(first, index))
        _unpack_block(code, form, own, memory)
        _compute_tiles(code, plain, tiles, own=own | {"values": memory, "groups": INT(1), "last": INT(0)}, at_once=1)

    code.for_each(count, compute)
    code.ret_void()
    return compiled(module, optimizes=False)("wide")


def _unpack_block(code: Code, form: PackedForm, own: dict[str, ir.Value], memory: ir.Value) -> None:
    """Write the weights of a block as float32 (K, LANES)."""
    factors = _scales_of_word() if form.kind == "uint4" else [1.0]
    size = len(factors)

    def unpack_group(group: ir.Value) -> None:
        start = code.mul(group, INT(form.group))
        scale, shift = _factors(code, form, own, code.mul(group, INT(LANES)))
        scales = [code.fmul(scale, ir.Constant(_FLOATS, [factor] * LANES)) for factor in factors]

        def unpack(index: ir.Value) -> None:
            position = code.mul(code.add(start, index), INT(LANES))
            offset = code.udiv(code.mul(position, INT(int(2 * _PACKED_BYTES[form.kind]))), INT(2))
            packed = _packed(code, form, code.at(own["values"], offset, BYTE))
            for each in range(size):
                value = code.fmul(_unpacked(code, form, packed, each), scales[each])
                value = code.fadd(value, shift) if form.adds_sums else value
                code.store(value, code.at(memory, code.add(position, INT(each * LANES))), align=4)

        code.for_each(INT(form.group), unpack, step=size)

    code.for_each(own["groups"], unpack_group)


def rounded_at_once(group: int) -> int:
    """How many inputs of a group are rounded with one scale. 0 if the processor does not multiply bytes."""
    fitting = (size for size in _ROUNDED_AT_ONCE if has_dot() and group % size == 0)
    return next(fitting, 0)


def _add_prepare_function(module: ir.Module, form: PackedForm) -> None:
    """prepare(arguments, row): the sums of each group of inputs, and inputs for values of 4 bits, or rounded ones."""
    code, given, row = item_function(module, "prepare", ARGUMENTS)
    if form.rounded:
        _round_inputs(code, form, given, row)
        return
    inputs = code.mul(row, INT(form.inputs))
    source, scaled = code.at(given["inputs"], inputs), code.at(given["x"], inputs)
    sums = code.at(given["sums"], code.mul(row, given["groups"]))

    def add(group: ir.Value) -> None:
        start = code.at(source, code.mul(group, INT(form.group)))
        x = code.load(start, typ=ir.VectorType(FLOAT, form.group), align=4)
        code.store(code.total(x), code.at(sums, group), align=4)

    def scale(index: ir.Value) -> None:
        x = code.load(code.at(source, index), typ=ir.VectorType(FLOAT, IN_WORD), align=4)
        code.store(code.fmul(x, ir.Constant(x.type, _scales_of_word())), code.at(scaled, index), align=4)

    if form.adds_sums:
        code.for_each(given["groups"], add)
    if form.kind == "uint4":
        code.for_each(INT(form.inputs), scale, step=IN_WORD)
    code.ret_void()


def _round_inputs(code: Code, form: PackedForm, given: dict[str, ir.Value], row: ir.Value) -> None:
    """Write the rounded inputs of a row, their scales and starts, and the sums of each group."""
    size = form.rounded
    floats_of, words_of, bytes_of = (ir.VectorType(kind, size) for kind in (FLOAT, _WORD, BYTE))
    steps_of = (*range(0, IN_WORD, 2), *range(1, IN_WORD, 2)) if form.kind == "uint4" else range(DOT)
    inputs = [first + each for first in range(0, size, form.in_word) for each in steps_of]
    parts = [inputs[first : first + DOT] for first in range(0, size, DOT)]
    places = [place + low for part in parts for low in (0, size) for place in part]
    order = ir.Constant(ir.VectorType(_WORD, 2 * size), places)
    eight = ir.Constant(words_of, [8] * size)
    first = code.mul(row, INT(form.inputs))
    source, out = code.at(given["inputs"], first), code.at(given["x"], code.mul(first, INT(2)), BYTE)
    steps = code.at(given["steps"], code.mul(row, INT(2 * form.inputs // size)))
    sums = code.at(given["sums"], code.mul(row, given["groups"]))

    def round_step(start: ir.Value, total: ir.Value) -> ir.Value:
        """Returns the total and the sum of the inputs of a step."""
        x = code.load(code.at(source, start), typ=floats_of, align=4)
        largest = code.largest(code.absolute(x))
        # What is not finite makes the scale NaN.
        scale = code.multiply_add(code.total(x), FLOAT(0.0), code.fmul(largest, FLOAT(1 / _LARGEST)))
        inverse = code.fdiv(FLOAT(_LARGEST), code.maximum(largest, FLOAT(_LEAST)))
        rounded = code.fptosi(code.nearest(code.fmul(x, code.splat(inverse, size))), words_of)
        whole, place = code.integer_total(rounded), code.mul(code.udiv(start, INT(size)), INT(2))
        low = code.trunc(rounded, bytes_of)
        high = code.trunc(code.ashr(code.sub(rounded, code.sext(low, words_of)), eight), bytes_of)
        both = code.shuffle_vector(high, low, order)
        code.store(both, code.at(out, code.mul(start, INT(2)), BYTE), align=4)
        code.store(scale, code.at(steps, place), align=4)
        code.store(code.mul(whole, _WORD(form.start)), code.at(steps, code.add(place, INT(1))), align=4)
        return code.multiply_add(scale, code.sitofp(whole, FLOAT), total)

    def round_group(group: ir.Value) -> None:
        start = code.mul(group, INT(form.group))
        [total] = code.repeat(
            INT(form.group), [FLOAT(0.0)], lambda index, own: [round_step(code.add(start, index), own[0])], step=size
        )
        if form.adds_sums:
            code.store(total, code.at(sums, group), align=4)

    code.for_each(given["groups"], round_group)
    code.ret_void()


def _has_many_registers() -> bool:
    return "avx512f" in cpu_features()


def tile_shapes(form: PackedForm) -> dict[int, int]:
    """The largest number of rows of a tile by its number of blocks, most blocks first. Its sums fit into the registers.

    Several blocks give few rows enough sums for a processor to add to some while others are not ready. Values of 4 bits
    do so with one block from 7 rows on, and need registers for unpacking. Rounded inputs need two sums for each.
    """
    if form.rounded:
        return {2: 3, 1: 5} if _has_many_registers() else {1: 3}
    if not _has_many_registers():
        return {2: 2, 1: 6}
    return {2: 6, 1: 12} if form.kind == "uint4" else {4: 3, 2: 12}


def most_rows(form: PackedForm) -> int:
    """The largest number of rows of a tile."""
    return max(tile_shapes(form).values())


def _near_bytes(kind: str) -> int:
    """How far ahead a single tile of rows asks for weights. 0: for the next blocks."""
    if _has_many_registers():
        return 512 if kind == "float32" else 4096
    return 1024 if kind == "float32" else 0


@cache
def product_functions(form: PackedForm) -> tuple[int, int]:
    """The addresses of `block`, and of `prepare` or 0."""
    module = ir.Module("products")
    _add_block_function(module, form)
    if form.is_prepared:
        _add_prepare_function(module, form)
    address = compiled(module, optimizes=False)
    return address("block"), address("prepare") if form.is_prepared else 0
