"""Products by the matrix instructions of Intel processors (AMX).

One instruction multiplies a tile of inputs with a tile of weights and adds the product to a tile of sums; each tile
has up to 16 rows of 64 bytes. So passes of up to 16 rows take little more time than single rows, except with values of
4 bits, which are unpacked into memory first, and with a scale for every 16 inputs, which fill a quarter of a row.

- Inputs for small integers, which are rounded to 16 bits, are split into their two bytes. All sums of integers are
  exact, so the bits are those of `product_code`.
- For values of 4 bits, these bytes and the values are in bfloat16, and their products are added in one tile of float32.
  A sum of 32 products is an integer of at most 32 x 32,767 x 15, less than 2^24, which float32 holds.
- Inputs for weights in bfloat16 are split into three values in bfloat16 that together are the float32. Their products
  are exact and are added in float32. The order depends on nothing but the number of inputs, so that rows do not depend
  on others; but the bits are not those of other processors.
"""

import ctypes
import platform
import struct
from functools import cache

from llvmlite import ir

from utils.engine.machine_code import BYTE, FLOAT, INT, POINTER, Code, compiled, cpu_features, item_function
from utils.engine.product_code import (
    AHEAD,
    ARGUMENTS,
    LANES,
    PAIRS,
    WORDS,
    ZERO,
    PackedForm,
    add_prepare_function,
    group_factors,
    of_block,
    order,
)

STEP = 32  # inputs in bfloat16 that are a row of a tile
_ROWS, _LINE = 16, 64  # of a tile, and the bytes of a row
_PARTS = 3  # values in bfloat16 that are a float32
_BLOCKS = {"bfloat16": 4, "uint4": 3, "int8": 2, "uint8": 2}  # that are computed together
_SUMS = 4  # tiles of sums, the last ones. Those of inputs come first, then those of weights
_LEAST_ROWS = {64: 6, 32: 6, 16: 9}  # by the inputs that are rounded with one scale: fewer rows take as long or longer
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_Own = list[dict[str, ir.Value]]  # the arguments of each block


@cache
def has_tiles() -> bool:
    """Whether the processor has tiles and the operating system lets this process use them."""
    if not {"amx-tile", "amx-int8", "amx-bf16"} <= cpu_features() or platform.system() != "Linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def uses_tiles(form: PackedForm, rows: int, groups: int) -> bool:
    """Whether a product of so many rows, with groups of inputs that have a scale each, is computed in tiles."""
    if form.has_pairs:
        return True
    # With values of 4 bits, the inputs of a group are one row of a tile.
    fits = form.is_group and form.rounded == STEP if form.kind == "uint4" else form.is_group or groups == 1
    return fits and form.rounded in _LEAST_ROWS and rows >= _LEAST_ROWS[form.rounded] and has_tiles()


def matrix_tile(form: PackedForm, rows: int) -> tuple[int, int]:
    """Return how many rows and blocks are computed together in a product of so many rows."""
    return -(-rows // -(-rows // _ROWS)), _BLOCKS[form.kind]


def prepared_sizes(form: PackedForm, inputs: int, rows: int, groups: int) -> list[int]:
    """Like PackedForm.prepared, for a product in tiles of rows with so many inputs each."""
    padded = inputs * (rows + _ROWS)  # tiles are read whole
    x, *others = form.prepared(padded, groups * rows)
    return [2 * x if form.kind == "uint4" else x, *others] if form.rounded else [_PARTS * padded // 2, 0, 0]


class _Product:
    """block(arguments, item): the product of all rows with `span` blocks."""

    def __init__(self, module: ir.Module, form: PackedForm) -> None:
        self._form, self._at_once = form, matrix_tile(form, 1)[1]
        self._code, self._given, item = item_function(module, "block", ARGUMENTS)
        code, given = self._code, self._given
        self._first, self._size = code.mul(item, given["span"]), given["tile_rows"]
        self._count = code.smaller(code.sub(given["blocks"], self._first), given["span"])
        self._width = _width(form)
        self._steps = code.udiv(given["length"], INT(form.rounded or STEP))
        self._is_packed = form.kind == "uint4"
        self._sums = 1 if self._is_packed else 2  # tiles of sums of a block
        sizes = (1, 1, 2 * self._sums)
        self._totals, self._unpacked, self._results = (self._tiles(count * self._at_once) for count in sizes)

    def _tiles(self, count: int) -> ir.Value:
        """Memory of the function for so many tiles."""
        memory = self._code.alloca(ir.ArrayType(BYTE, _LINE), count * _ROWS)
        memory.align, memory.type = _LINE, POINTER
        return memory

    def _line(self, memory: ir.Value, tile: int, row: ir.Value) -> ir.Value:
        place = self._code.add(row, INT(tile * _ROWS))
        return self._code.at(memory, self._code.mul(place, INT(_LINE)), BYTE)

    def _load(self, memory: ir.Value, tile: int, row: ir.Value, kind: ir.Type = ZERO.type) -> ir.Value:
        return self._code.load(self._line(memory, tile, row), typ=kind, align=_LINE)

    def write(self) -> None:
        code, shapes = self._code, _shapes(self._code.module, self._form)
        code.tile("ldtilecfg", code.at(shapes, code.mul(code.sub(self._size, INT(1)), INT(_LINE)), BYTE))
        code.for_each(self._count, self._compute_blocks, step=self._at_once)
        code.tile("tilerelease")
        code.ret_void()

    def _compute_blocks(self, index: ir.Value) -> None:
        code, given, last = self._code, self._given, self._code.sub(self._count, INT(1))
        places = [code.smaller(code.add(index, INT(block)), last) for block in range(self._at_once)]
        own = [of_block(code, self._form, given, code.add(self._first, place)) for place in places]

        def compute(tile: ir.Value) -> None:
            first = code.mul(tile, self._size)
            rows = code.smaller(code.sub(given["rows"], first), self._size)
            if self._form.rounded:
                self._add_rounded(own, tile, rows)
            else:
                self._add_floats(own, tile)
            code.for_each(rows, lambda row: self._write_row(own, row, code.add(first, row)))

        code.for_each(code.udiv(code.add(given["rows"], code.sub(self._size, INT(1))), self._size), compute)

    def _write_row(self, own: _Own, row: ir.Value, place: ir.Value) -> None:
        """Write the outputs of a row of a tile. place: of the row among all."""
        code, form = self._code, self._form
        for block, each in enumerate(own):
            total = self._load(self._totals, block, row)
            if form.rounded and not form.is_group:  # all inputs are one group
                total = self._with_group(total, group_factors(code, form, each, INT(0)), ZERO, group=INT(0), row=place)
            total = code.fadd(total, code.floats(each["bias"], "float32", LANES)) if form.has_bias else total
            code.store(total, code.at(each["out"], code.mul(place, self._given["out_stride"])), align=4)

    def _with_group(
        self, part: ir.Value, factors: tuple[ir.Value, ir.Value], total: ir.Value, *, group: ir.Value, row: ir.Value
    ) -> ir.Value:
        """A total with the sum of a group times its scale, and the sum of its inputs times its shift."""
        code, (scale, shift) = self._code, factors
        total = code.multiply_add(part, scale, total)
        if not self._form.has_shifts:
            return total
        index = code.add(group, code.mul(self._given["groups"], row))
        whole = code.load(code.at(self._given["sums"], index), typ=FLOAT, align=4)
        return code.multiply_add(code.splat(whole, LANES), shift, total)

    def _load_inputs(self, tile: ir.Value, step: ir.Value, parts: int) -> None:
        code, size = self._code, self._code.mul(self._size, INT(self._width))
        first = code.mul(code.add(code.mul(tile, self._steps), step), INT(parts))
        for part in range(parts):
            place = code.mul(code.add(first, INT(part)), size)
            code.tile("tileloadd64", BYTE(part), code.at(self._given["x"], place, BYTE), INT(self._width))

    def _values(self, own: dict[str, ir.Value], step: ir.Value) -> ir.Value:
        """Where the weights of a step are. Later ones are prefetched."""
        code, size = self._code, (self._form.rounded or STEP) * self._form.block_bytes
        values = code.at(own["values"], code.mul(step, INT(size)), BYTE)
        for line in range(0, size, _LINE):
            code.prefetch(code.at(values, INT(line + AHEAD // (2 * self._at_once)), BYTE))
        return values

    def _add_floats(self, own: _Own, tile: ir.Value) -> None:
        code, weights = self._code, BYTE(_PARTS)
        for block in range(len(own)):
            code.tile("tilezero", BYTE(_SUMS + block))

        def add(step: ir.Value) -> None:
            self._load_inputs(tile, step, _PARTS)
            for block, each in enumerate(own):
                code.tile("tileloadd64", weights, self._values(each, step), INT(_LINE))
                for part in reversed(range(_PARTS)):
                    code.tile("tdpbf16ps", BYTE(_SUMS + block), BYTE(part), weights)

        code.for_each(self._steps, add)
        for block in range(len(own)):
            code.tile("tilestored64", BYTE(_SUMS + block), self._line(self._totals, block, INT(0)), INT(_LINE))

    def _add_rounded(self, own: _Own, tile: ir.Value, rows: ir.Value) -> None:
        """Add all steps to the totals, each of inputs with one scale.

        The sums of a step are stored while the next one is multiplied, and added while the one after that is: products
        of tiles complete late, and lines that were just stored are read slowly.
        """
        code = self._code

        def clear(row: ir.Value) -> None:
            for block in range(len(own)):
                code.store(ZERO, self._line(self._totals, block, row), align=_LINE)

        def compute(step: ir.Value) -> None:
            is_step, is_third = code.icmp_unsigned("<", step, self._steps), code.icmp_unsigned(">=", step, INT(2))
            following = code.smaller(code.add(step, INT(1)), code.sub(self._steps, INT(1)))
            with code.if_then(is_step):
                self._load_inputs(tile, step, 2)
            for block, each in enumerate(own):
                self._store_sums(block, code.sub(step, INT(1)))
                with code.if_then(is_step):
                    self._multiply(each, block, step)
                    self._unpack(each, block, following)
                with code.if_then(is_third):
                    self._add_step(each, block, tile, rows=rows, step=code.sub(step, INT(2)))

        code.for_each(rows, clear)
        for block, each in enumerate(own):
            self._unpack(each, block, INT(0))
        code.for_each(code.add(self._steps, INT(2)), compute)

    def _multiply(self, own: dict[str, ir.Value], block: int, step: ir.Value) -> None:
        """Compute the sums of a step: those of high and of low bytes of inputs, or both together."""
        code, weights = self._code, BYTE(2 + block % 2)
        values = self._line(self._unpacked, block, INT(0)) if self._is_packed else self._values(own, step)
        code.tile("tileloadd64", weights, values, INT(_LINE))
        for part, sign in enumerate("su"):
            sums = BYTE(_SUMS + self._sums * block + part % self._sums)
            if part < self._sums:
                code.tile("tilezero", sums)
            name = f"tdpb{sign}{'s' if self._form.kind == 'int8' else 'u'}d"
            code.tile("tdpbf16ps" if self._is_packed else name, sums, BYTE(part), weights)

    def _results_of(self, step: ir.Value) -> ir.Value:
        """Where the sums of a step are stored. Those of the next step are elsewhere."""
        size = self._sums * self._at_once * _ROWS * _LINE
        return self._code.at(self._results, self._code.mul(self._code.and_(step, INT(1)), INT(size)), BYTE)

    def _store_sums(self, block: int, step: ir.Value) -> None:
        for place in range(self._sums * block, self._sums * (block + 1)):
            line = self._line(self._results_of(step), place, INT(0))
            self._code.tile("tilestored64", BYTE(_SUMS + place), line, INT(_LINE))

    def _add_step(
        self, own: dict[str, ir.Value], block: int, tile: ir.Value, *, rows: ir.Value, step: ir.Value
    ) -> None:
        """Add the sums that were stored to the totals of all rows of a tile."""
        code, form, size = self._code, self._form, self._size
        factors = group_factors(code, form, own, code.mul(step, INT(LANES))) if form.is_group else None
        line = code.mul(code.add(code.mul(tile, self._steps), step), size)
        results = self._results_of(step)

        def add(row: ir.Value) -> None:
            place = code.at(self._given["steps"], code.mul(code.add(line, row), INT(2)))
            scale = code.splat(code.load(place, typ=FLOAT, align=4), LANES)
            if self._is_packed:
                found = self._load(results, block, row)
            else:
                start = code.splat(code.load(code.at(place, INT(1)), typ=WORDS.element, align=4), LANES)
                high, low = (self._load(results, 2 * block + part, row, WORDS) for part in range(2))
                found = code.sitofp(code.add(code.add(code.shl(high, code.like(high, 8)), low), start), ZERO.type)
            total = self._load(self._totals, block, row)
            if factors is not None:
                part = code.multiply_add(found, scale, ZERO)
                own_row = code.add(code.mul(tile, size), row)
                total = self._with_group(part, factors, total, group=step, row=own_row)
            else:
                total = code.multiply_add(found, scale, total)
            code.store(total, self._line(self._totals, block, row), align=_LINE)

        code.for_each(rows, add)

    def _unpack(self, own: dict[str, ir.Value], block: int, step: ir.Value) -> None:
        """Write values of 4 bits in bfloat16."""
        if not self._is_packed:
            return
        code = self._code
        table = [_bfloat16(value % 16 + self._form.offset) for value in range(32)]
        values = self._values(own, step)
        for word in range(self._form.rounded // self._form.in_word):
            packed = code.load(code.at(values, INT(word * _LINE), BYTE), typ=PAIRS, align=1)
            for place in range(4):
                shifted = code.lshr(packed, code.like(packed, 4 * place)) if place else packed
                line = self._line(self._unpacked, block, INT(4 * word + place))
                code.store(code.entries(table, shifted), line, align=_LINE)


def _bfloat16(value: int) -> int:
    """The bits of a small integer in bfloat16."""
    return int.from_bytes(struct.pack(">f", value)[:2])


def _width(form: PackedForm) -> int:
    """Bytes of a row of inputs."""
    return form.rounded if form.kind in ("int8", "uint8") else _LINE


def _shapes(module: ir.Module, form: PackedForm) -> ir.Value:
    """For each number of rows the shapes of all tiles, as the processor reads them: bytes of each row, then rows."""
    width, weights = _width(form), 2 if form.rounded else 1
    lines = bytearray()
    for rows in range(1, _ROWS + 1):
        line, inputs = bytearray(_LINE), _SUMS - weights
        line[0] = 1  # the only kind of shapes
        line[16:32:2] = [width] * inputs + [_LINE] * (weights + _SUMS)
        line[48:56] = [rows] * inputs + [width // 4] * weights + [rows] * _SUMS
        lines += line
    kind = ir.ArrayType(BYTE, len(lines))
    shapes = ir.GlobalVariable(module, kind, "shapes")
    shapes.linkage, shapes.initializer = "internal", ir.Constant(kind, lines)
    return shapes


def _line_of_tile(code: Code, own: dict[str, ir.Value], *, inputs: int, part: int, parts: int) -> ir.Value:
    """The number of the line with so many inputs of a row from a start on. Lines are in the order in which they are
    loaded: of each tile of rows all parts of the first inputs, then those of the next ones.
    """
    tile, row = code.udiv(own["row"], own["tile_rows"]), code.urem(own["row"], own["tile_rows"])
    steps, step = (code.udiv(own[name], INT(inputs)) for name in ("length", "start"))
    step = code.add(code.mul(tile, steps), step)
    return code.add(code.mul(code.add(code.mul(step, INT(parts)), INT(part)), own["tile_rows"]), row)


def _store_bytes(code: Code, form: PackedForm, own: dict[str, ir.Value], rounded: ir.Value) -> ir.Value:
    """Store the high and the low bytes of rounded inputs. Returns where their scale and start belong."""
    size, bytes_of = form.rounded, ir.VectorType(BYTE, form.rounded)
    for part, value in enumerate((code.ashr(rounded, code.like(rounded, 8)), rounded)):
        line = _line_of_tile(code, own, inputs=size, part=part, parts=2)
        code.store(code.trunc(value, bytes_of), code.at(own["x"], code.mul(line, INT(size)), BYTE), align=4)
    line = _line_of_tile(code, own, inputs=size, part=0, parts=1)
    return code.at(own["steps"], code.mul(line, INT(2)))


def _store_halves(code: Code, own: dict[str, ir.Value], floats: ir.Value, *, part: int, parts: int) -> None:
    """Store the upper halves of STEP values, which are bfloat16."""
    bits = code.bitcast(floats, ir.VectorType(ir.IntType(32), STEP))
    halves = code.trunc(code.lshr(bits, code.like(bits, 16)), ir.VectorType(ir.IntType(16), STEP))
    line = _line_of_tile(code, own, inputs=STEP, part=part, parts=parts)
    code.store(halves, code.at(own["x"], code.mul(line, INT(_LINE)), BYTE), align=4)


def _store_floats(code: Code, form: PackedForm, own: dict[str, ir.Value], rounded: ir.Value) -> ir.Value:
    """Like `_store_bytes`, in bfloat16. High bytes are multiplied by 256."""
    places = [first + each for first in range(0, STEP, form.in_word) for each in order(form)]
    rounded = code.chosen(rounded, rounded, places)
    for part, mask in enumerate((-256, 255)):
        value = code.sitofp(code.and_(rounded, code.like(rounded, mask)), ir.VectorType(FLOAT, STEP))
        _store_halves(code, own, value, part=part, parts=2)
    line = _line_of_tile(code, own, inputs=STEP, part=0, parts=1)
    return code.at(own["steps"], code.mul(line, INT(2)))


def _add_split_function(module: ir.Module) -> None:
    """prepare(arguments, row): the inputs of a row as values in bfloat16 whose sum they are."""
    code, given, row = item_function(module, "prepare", ARGUMENTS)
    floats, words = (ir.VectorType(kind, STEP) for kind in (FLOAT, ir.IntType(32)))
    source = code.at(given["inputs"], code.mul(row, given["length"]))

    def split(start: ir.Value) -> None:
        rest = code.load(code.at(source, start), typ=floats, align=4)
        for part in range(_PARTS):
            _store_halves(code, given | {"row": row, "start": start}, rest, part=part, parts=_PARTS)
            value = code.and_(code.bitcast(rest, words), ir.Constant(words, [0xFFFF0000] * STEP))
            rest = code.fsub(rest, code.bitcast(value, floats))

    code.for_each(given["length"], split, step=STEP)
    code.ret_void()


@cache
def tile_functions(form: PackedForm) -> tuple[int, int]:
    """The addresses of `block` and `prepare` for products in tiles."""
    module = ir.Module("tiles")
    _Product(module, form).write()
    if form.rounded:
        store = _store_floats if form.kind == "uint4" else _store_bytes
        add_prepare_function(module, form, store, form.offset)
    else:
        _add_split_function(module)
    address = compiled(module, optimizes=False)
    return address("block"), address("prepare")
