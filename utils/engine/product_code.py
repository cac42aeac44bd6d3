"""Products with packed weights in machine code.

A weight (N, K) is stored in blocks of LANES outputs. For each input in turn, one value of every output of a block is
multiplied with the inputs of all rows and added to their sums. So the weights are read once for all rows, and every
sum is formed in the order of the inputs: its bits depend neither on the number of rows nor on the number of threads.
The tiles of sums in registers follow Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
Weights are unpacked in registers: those of 16 bits, and small integers with a scale for each group of inputs.

For weights that are small integers, inputs are rounded to 16 bits, with a scale for up to 64 of them, because
processors multiply pairs of such integers and add the products in one or two instructions. Sums of integers are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import ir

from utils.engine.machine_code import (
    BYTE,
    FLOAT,
    INT,
    POINTER,
    STORED,
    Code,
    compiled,
    cpu_features,
    inner_function,
    item_function,
)

LANES = 16  # outputs of a block
_WORD, _HALF = ir.IntType(32), ir.IntType(16)
_FLOATS, WORDS, PAIRS = (ir.VectorType(*kind) for kind in ((FLOAT, LANES), (_WORD, LANES), (_HALF, 2 * LANES)))
ZERO = ir.Constant(_FLOATS, [0.0] * LANES)
_LARGEST = 32767.0  # of rounded inputs
AHEAD = 8192  # bytes of weights, of all blocks together, by which a single tile of rows prefetches
_LEAST = 1e-30  # if no input of a group is larger, they become zero
_PACKED_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "uint8": 8, "uint4": 4}  # of a value
_ROUNDED_AT_ONCE = (64, 32, 16, 8, 4)  # inputs with one scale, of which a group must have a multiple
_TILE_ARGUMENTS = {
    "x": POINTER,  # (rows, K), prepared for the form
    "steps": POINTER,  # of rounded inputs: (rows, K / rounded, 2), the scale and where the sum of integers starts
    "values": POINTER,
    "scales": POINTER,
    "shifts": POINTER,
    "factors": POINTER,  # of scales and shifts that are small integers: one of each for some adjacent groups
    "bias": POINTER,
    "sums": POINTER,  # of the inputs of each group: (rows, K / group)
    "out": POINTER,
    "out_stride": INT,
    "length": INT,  # K
    "group": INT,  # inputs with one scale, K without scales
    "groups": INT,
    "last": INT,  # the last block that there is. A tile with more blocks computes it several times
    "ahead": POINTER,  # weights that are prefetched meanwhile, those of the first block
    "share": INT,  # how many: one of 2^share parts of each block
    "turn": INT,  # from how many bytes of a block on the prefetched weights are those of the next tile
}
ARGUMENTS = _TILE_ARGUMENTS | {
    "inputs": POINTER,
    "blocks": INT,
    "rows": INT,
    "span": INT,  # blocks of an item
    "tile_rows": INT,
    "tile_blocks": INT,
}
PREPARED = ("x", "steps", "sums")  # what is in scratch memory
IN_WORD = {"uint4": 8, "int8": 4, "uint8": 4}  # values of adjacent inputs that are 32 bits together


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How values are stored. kind: a key of _PACKED_BITS. rounded: inputs that are rounded with one scale, 0 if they
    stay floats. is_group: whether they are all inputs whose weights share a scale. scales: the number format of scales
    and shifts. offset: as in BlockWeight. has_pairs: of bfloat16, whether two adjacent inputs are a word, as
    `matrix_tiles` reads them. in_super: groups that share a factor, 0 without factors.
    """

    kind: str
    rounded: int = 0
    is_group: bool = False
    scales: str = "float32"
    offset: int = 0
    has_shifts: bool = False
    has_bias: bool = False
    has_pairs: bool = False
    in_super: int = 0

    @property
    def in_word(self) -> int:
        """Inputs whose values are stored beside each other, of one output after the other."""
        return 2 if self.has_pairs else IN_WORD.get(self.kind, 1)

    @property
    def start(self) -> int:
        """What must be added to the unsigned values that products read."""
        return self.offset - (128 if self.kind == "int8" else 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's values of one input."""
        return LANES * _PACKED_BITS[self.kind] // 8

    def prepared(self, inputs: int, groups: int) -> list[int]:
        """Sizes of what is prepared for so many inputs in groups, in values of 4 bytes, in the order of PREPARED."""
        return [inputs // 2, 2 * inputs // self.rounded, groups * self.has_shifts] if self.rounded else [0, 0, 0]


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a tile computes at once. rows: possible numbers of rows."""

    blocks: int
    rows: range


def _packed(code: Code, form: PackedForm, pointer: ir.Value) -> ir.Value:
    """The values of one input, or those of a word of inputs as pairs of 16 bits."""
    return code.load(pointer, typ=PAIRS, align=1) if form.rounded else code.floats(pointer, form.kind, LANES)


def group_factors(code: Code, form: PackedForm, own: dict[str, ir.Value], place: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The scales and shifts of a group of each output. place: of their first."""
    found = []
    for index, name in enumerate(("scales", "shifts")[: 1 + form.has_shifts]):
        values = code.floats(code.at(own[name], place, STORED[form.scales]), form.scales, LANES)
        if form.in_super:
            super_group = code.mul(code.udiv(place, INT(LANES * form.in_super)), INT(1 + form.has_shifts))
            factors = code.at(own["factors"], code.mul(code.add(super_group, INT(index)), INT(LANES)))
            values = code.fmul(values, code.floats(factors, "float32", LANES))
        found.append(values)
    return found[0], found[1] if form.has_shifts else ZERO


def _pairs(code: Code, form: PackedForm, packed: ir.Value) -> list[ir.Value]:
    """The values of a word of inputs, those of two inputs in each vector, in the order of `order`."""
    if form.kind == "uint4":
        shifted = [packed, *(code.lshr(packed, code.like(packed, bits)) for bits in (4, 8, 12))]
        return [*(code.and_(values, code.like(packed, 15)) for values in shifted[:-1]), shifted[-1]]
    packed = code.xor(packed, code.like(packed, 0x8080)) if form.kind == "int8" else packed
    return [code.and_(packed, code.like(packed, 0xFF)), code.lshr(packed, code.like(packed, 8))]


def order(form: PackedForm) -> list[int]:
    """Which inputs of a word are pairs."""
    return [0, 4, 1, 5, 2, 6, 3, 7] if form.kind == "uint4" else [0, 2, 1, 3]


class _Tile:
    """The product of some rows with the outputs of adjacent blocks. Sums are numbered block by block, row by row.

    Pointers are those of the first row and block.
    """

    def __init__(self, module: ir.Module, form: PackedForm, rows: int, blocks: int) -> None:
        self._code, arguments = inner_function(module, f"tile_{rows}_{blocks}", [*_TILE_ARGUMENTS.values()])
        self._form, self._rows = form, rows
        self._given = dict(zip(_TILE_ARGUMENTS, arguments, strict=True))
        places = [self._code.smaller(INT(block), self._given["last"]) for block in range(blocks)]
        self._blocks = [of_block(self._code, form, self._given, place) for place in places]
        self._block_bytes = _block_bytes(self._code, form, self._given)
        self._inputs = self._of_rows("x", _x_bytes(self._code, form, self._given["length"]))
        self._steps = self._of_rows("steps", _step_bytes(self._code, form, self._given["length"]))
        self._zeros = [ZERO] * (rows * blocks)
        self._at_once = form.in_word

    def _of_rows(self, name: str, size: ir.Value) -> list[ir.Value]:
        """The pointers of all rows to a part with so many bytes in each row."""
        code = self._code
        return [code.at(self._given[name], code.mul(size, INT(row)), BYTE) for row in range(self._rows)]

    def write(self) -> ir.Function:
        code, groups = self._code, self._given["groups"]
        totals = code.repeat(groups, self._zeros, self._add_group) if self._form.rounded else self._sums_of_floats()
        for place, total in enumerate(totals):
            own, row = self._blocks[place // self._rows], place % self._rows
            total = code.fadd(total, code.floats(own["bias"], "float32", LANES)) if self._form.has_bias else total
            code.store(total, code.at(own["out"], code.mul(self._given["out_stride"], INT(row))), align=4)
        code.ret_void()
        return code.function

    def _add_group(self, group: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        """Add the sums of a group times its scale, and the sum of its inputs times its shift."""
        code, sums, position = self._code, self._group_sums(group), self._code.mul(group, INT(LANES))
        factors = [group_factors(code, self._form, own, position) for own in self._blocks]
        for place, part in enumerate(sums):
            (scale, shift), row = factors[place // self._rows], place % self._rows
            totals[place] = code.multiply_add(part, scale, totals[place])
            if self._form.has_shifts:
                index = code.add(group, code.mul(self._given["groups"], INT(row)))
                total = code.load(code.at(self._given["sums"], index), typ=FLOAT, align=4)
                totals[place] = code.multiply_add(code.splat(total, LANES), shift, totals[place])
        return totals

    def _group_sums(self, group: ir.Value) -> list[ir.Value]:
        """The sums of a group of inputs."""
        code, size = self._code, self._given["group"]
        first = code.mul(group, size)
        if self._form.is_group:
            return self._sums_of_integers(first, self._zeros)
        return code.repeat(
            size,
            self._zeros,
            lambda index, sums: self._sums_of_integers(code.add(first, index), sums),
            step=self._form.rounded,
        )

    def _sums_of_floats(self) -> list[ir.Value]:
        """The sums of all inputs."""
        code = self._code

        def add(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            values = self._next_weights(index)
            for row, pointer in enumerate(self._inputs):
                x = code.splat(code.load(code.at(pointer, index), typ=FLOAT, align=4), LANES)
                for place in range(row, len(sums), self._rows):
                    sums[place] = code.multiply_add(x, values[place // self._rows], sums[place])
            return sums

        return code.repeat(self._given["length"], self._zeros, add)

    def _sums_of_integers(self, first: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """The sums, and those of the inputs that share a scale with the first one."""
        code, form = self._code, self._form
        scales, starts = list[ir.Value](), list[ir.Value]()
        place = code.mul(code.udiv(first, INT(form.rounded)), INT(2))
        for pointer in self._steps:
            for index, kind, found in ((0, FLOAT, scales), (1, _WORD, starts)):
                part = code.at(pointer, code.add(place, INT(index)))
                found.append(code.splat(code.load(part, typ=kind, align=4), LANES))
        inputs = [code.at(pointer, code.mul(first, INT(2)), BYTE) for pointer in self._inputs]

        def add(index: ir.Value, integers: list[ir.Value]) -> list[ir.Value]:
            packed = [_pairs(code, form, part) for part in self._next_weights(code.add(first, index))]
            for pair in range(self._at_once // 2):
                for row, pointer in enumerate(inputs):
                    place = code.at(pointer, code.add(index, INT(2 * pair)), _HALF)
                    x = code.bitcast(code.splat(code.load(place, typ=_WORD, align=4), LANES), PAIRS)
                    for total in range(row, len(sums), self._rows):
                        integers[total] = code.dot(integers[total], packed[total // self._rows][pair], x)
            return integers

        integers = [starts[total % self._rows] for total in range(len(sums))]
        integers = code.repeat(INT(form.rounded), integers, add, step=self._at_once)
        return [
            code.multiply_add(code.sitofp(found, _FLOATS), scales[total % self._rows], sums[total])
            for total, found in enumerate(integers)
        ]

    def _next_weights(self, index: ir.Value) -> list[ir.Value]:
        """The values of a word of inputs from `index` on, of each block. Later ones are prefetched."""
        code = self._code
        place = code.mul(index, INT(self._form.block_bytes))
        ahead = code.at(self._given["ahead"], code.lshr(place, self._given["share"]), BYTE)
        others = code.mul(self._block_bytes, INT(len(self._blocks) - 1))
        is_next = code.icmp_unsigned(">=", place, self._given["turn"])
        ahead = code.at(ahead, code.select(is_next, others, INT(0)), BYTE)
        for block in range(len(self._blocks)):
            code.prefetch(code.at(ahead, code.mul(self._block_bytes, INT(block)), BYTE))
        return [_packed(code, self._form, code.at(own["values"], place, BYTE)) for own in self._blocks]


def _block_bytes(code: Code, form: PackedForm, given: dict[str, ir.Value]) -> ir.Value:
    return code.mul(given["length"], INT(form.block_bytes))


def _x_bytes(code: Code, form: PackedForm, inputs: ir.Value) -> ir.Value:
    """Bytes of so many inputs as products read them."""
    return code.mul(inputs, INT(2 if form.rounded else 4))


def _step_bytes(code: Code, form: PackedForm, inputs: ir.Value) -> ir.Value:
    """Bytes of the scales and starts of so many rounded inputs."""
    return code.udiv(code.mul(inputs, INT(8)), INT(form.rounded or 8))


def of_block(code: Code, form: PackedForm, given: dict[str, ir.Value], block: ir.Value) -> dict[str, ir.Value]:
    """The arguments of a block. The first block is that of the given ones."""
    place, outputs = code.mul(code.mul(block, given["groups"]), INT(LANES)), code.mul(block, INT(LANES))
    values = code.mul(block, _block_bytes(code, form, given))
    kind = STORED[form.scales]
    factors = code.mul(code.udiv(place, INT(form.in_super or 1)), INT(1 + form.has_shifts))
    return given | {
        "values": code.at(given["values"], values, BYTE),
        "scales": code.at(given["scales"], place, kind),
        "shifts": code.at(given["shifts"], place, kind),
        "factors": code.at(given["factors"], factors),
        "bias": code.at(given["bias"], outputs),
        "out": code.at(given["out"], outputs),
    }


def _add_block_function(module: ir.Module, form: PackedForm) -> None:
    """block(arguments, item): the product of all rows with `span` blocks, several at once."""
    code, given, item = item_function(module, "block", ARGUMENTS)
    first = code.mul(item, given["span"])
    count = code.smaller(code.sub(given["blocks"], first), given["span"])
    after = code.append_basic_block()
    for shape in tile_shapes(form):

        def compute(index: ir.Value) -> None:
            own = of_block(code, form, given, code.add(first, index))
            own["last"] = code.sub(code.sub(count, index), INT(1))
            _compute_tiles(code, form, shape, own)  # noqa: B023

        with code.if_then(code.icmp_unsigned("==", given["tile_blocks"], INT(shape.blocks))):
            code.for_each(count, compute, step=shape.blocks)
            code.branch(after)
    code.branch(after)
    code.position_at_end(after)
    code.ret_void()


def _compute_tiles(code: Code, form: PackedForm, shape: TileShape, own: dict[str, ir.Value]) -> None:
    """The product of all rows with the blocks of a tile, in tiles of rows."""
    size = own["tile_rows"]
    count_of_tiles = code.udiv(code.add(own["rows"], code.sub(size, INT(1))), size)
    # While blocks are computed, the next ones are brought from memory: by each tile of rows a part.
    block = _block_bytes(code, form, own)
    is_one, are_two = (code.icmp_unsigned("<=", count_of_tiles, INT(count)) for count in (1, 2))
    share = code.select(is_one, INT(0), code.select(are_two, INT(1), INT(2)))
    near = code.smaller(block, INT(AHEAD // shape.blocks))
    next_block = code.at(own["values"], code.select(is_one, near, code.mul(block, INT(shape.blocks))), BYTE)
    tiles = {rows: _Tile(code.module, form, rows, shape.blocks).write() for rows in shape.rows}

    def compute_tile(index: ir.Value) -> None:
        first = code.mul(index, size)
        before = code.mul(first, own["length"])
        part = own | {
            "ahead": code.at(next_block, code.mul(index, code.lshr(block, share)), BYTE),
            "share": share,
            "turn": code.select(is_one, code.sub(block, near), block),
            "x": code.at(own["x"], _x_bytes(code, form, before), BYTE),
            "steps": code.at(own["steps"], _step_bytes(code, form, before), BYTE),
            "sums": code.at(own["sums"], code.mul(first, own["groups"])),
            "out": code.at(own["out"], code.mul(first, own["out_stride"])),
        }
        count = code.smaller(code.sub(own["rows"], first), size)
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


def rounded_at_once(group: int) -> int:
    """How many inputs of a group are rounded with one scale. 0 if their number is odd or twice an odd one."""
    return next((size for size in _ROUNDED_AT_ONCE if group and group % size == 0), 0)


def _store_pairs(code: Code, form: PackedForm, own: dict[str, ir.Value], rounded: ir.Value) -> ir.Value:
    """Store the rounded inputs of a row from a start on. Returns where their scale and start belong."""
    places = [first + each for first in range(0, form.rounded, form.in_word) for each in order(form)]
    rounded = code.chosen(rounded, rounded, places)
    first = code.mul(own["row"], own["length"])
    halves = code.trunc(rounded, ir.VectorType(_HALF, form.rounded))
    code.store(halves, code.at(own["x"], code.add(first, own["start"]), _HALF), align=4)
    return code.at(own["steps"], _step_bytes(code, form, code.add(first, own["start"])), BYTE)


Store = Callable[[Code, PackedForm, dict[str, ir.Value], ir.Value], ir.Value]


def add_prepare_function(module: ir.Module, form: PackedForm, store: Store, added: int) -> None:
    """prepare(arguments, row): the rounded inputs of a row, their scales and starts, and the sums of each group.

    store: like `_store_pairs`. added: what must be added to the values that products read.
    """
    code, given, row = item_function(module, "prepare", ARGUMENTS)
    floats_of, words_of = (ir.VectorType(kind, form.rounded) for kind in (FLOAT, _WORD))
    source = code.at(given["inputs"], code.mul(row, given["length"]))
    sums = code.at(given["sums"], code.mul(row, given["groups"]))

    def round_step(start: ir.Value, total: ir.Value) -> ir.Value:
        """Returns the total and the sum of the inputs of a step."""
        x = code.load(code.at(source, start), typ=floats_of, align=4)
        largest = code.largest(code.absolute(x))
        # What is not finite makes the scale NaN.
        scale = code.multiply_add(code.total(x), FLOAT(0.0), code.fmul(largest, FLOAT(1 / _LARGEST)))
        inverse = code.fdiv(FLOAT(_LARGEST), code.maximum(largest, FLOAT(_LEAST)))
        rounded = code.fptosi(code.nearest(code.fmul(x, code.splat(inverse, form.rounded))), words_of)
        whole, step = code.integer_total(rounded), store(code, form, given | {"row": row, "start": start}, rounded)
        code.store(scale, step, align=4)
        code.store(code.mul(whole, _WORD(added)), code.at(step, INT(1)), align=4)
        return code.multiply_add(scale, code.sitofp(whole, FLOAT), total)

    def round_group(group: ir.Value) -> None:
        start = code.mul(group, given["group"])
        [total] = code.repeat(
            given["group"],
            [FLOAT(0.0)],
            lambda index, own: [round_step(code.add(start, index), own[0])],
            step=form.rounded,
        )
        if form.has_shifts:
            code.store(total, code.at(sums, group), align=4)

    code.for_each(given["groups"], round_group)
    code.ret_void()


def tile_shapes(form: PackedForm) -> list[TileShape]:
    """The shapes whose sums fit into the registers, in order of preference. The last one is used where one tile cannot
    hold all rows.

    Several blocks give few rows enough sums for a processor to add to some while others are not ready. Of the shapes
    that were tried, these were the fastest.
    """
    few, some = range(1, 3), range(1, 7)
    if "avx512f" in cpu_features():
        if form.rounded:  # weights that are unpacked need registers as well
            return [TileShape(4, few), TileShape(2, some), TileShape(1, range(1, 10))]
        return [TileShape(8, few), TileShape(4, some), TileShape(2, range(10, 13)), TileShape(3, range(1, 10))]
    one, last = TileShape(4, range(1, 2)), TileShape(1, some)
    if form.rounded:
        return [one, TileShape(2, few), last]
    three = [TileShape(2, range(3, 4))] if form.kind == "float32" else []  # others need registers to be unpacked
    return [one, TileShape(3, few), *three, last]


def tile_of(form: PackedForm, rows: int, blocks: int) -> tuple[int, int]:
    """Return how many rows and blocks each tile has in a product of so many rows and blocks."""
    shapes = tile_shapes(form)
    fitting = [shape.blocks for shape in shapes if rows in shape.rows]
    if not fitting:  # tiles of nearly equal size
        return -(-rows // -(-rows // shapes[-1].rows[-1])), shapes[-1].blocks
    shares = 2 * torch.get_num_threads()  # so that several threads have equal shares
    return rows, next((at_once for at_once in fitting if blocks >= shares * at_once), fitting[-1])


@cache
def product_functions(form: PackedForm) -> tuple[int, int]:
    """The addresses of `block`, and of `prepare` or 0."""
    module = ir.Module("products")
    _add_block_function(module, form)
    if form.rounded:
        add_prepare_function(module, form, _store_pairs, form.start)
    address = compiled(module, optimizes=False)
    return address("block"), address("prepare") if form.rounded else 0
