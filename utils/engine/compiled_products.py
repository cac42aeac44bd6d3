"""Products with packed weights in machine code that LLVM generates for this processor.

A weight (N, K) is stored in blocks of LANES outputs. For each input in turn, one value of every output of a block is
multiplied with the inputs of all rows and added to their sums. So the weights are read once for all rows, and every
sum is formed in the order of the inputs: its bits depend neither on the number of rows nor on the number of threads.
The tiles of sums in registers follow Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
Weights are unpacked in registers: bfloat16, and small integers with a scale for each group of inputs.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn.functional import pad

from utils.engine.machine_code import BYTE, FLOAT, INT, NATIVE_CALL, POINTER, WORKERS, Code, compiled, has_feature
from utils.engine.weight_blocks import BlockWeight

LANES = 16  # outputs of a block
_ITEMS = 32  # of a job, at most
# The arguments of a product, one machine word each.
_ARGUMENTS = ("x", "values", "scales", "minimums", "sums", "out", "blocks", "groups", "rows", "tile", "span")
_TILE_ARGUMENTS = _ARGUMENTS[:8]
_POINTERS = _ARGUMENTS[:6]
_PACKED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "uint8": 1.0, "uint4": 0.5}  # of a value


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How values are stored. kind: a key of _PACKED_BYTES. inputs: K. group: inputs that share a scale, 0 without
    scales.
    """

    kind: str
    inputs: int
    group: int = 0
    has_minimums: bool = False


_X, _SUMS, _OUT, _ROWS, _TILE = map(_ARGUMENTS.index, ("x", "sums", "out", "rows", "tile"))
_Words = ctypes.c_int64 * len(_ARGUMENTS)


def _vector(code: Code, pointer: ir.Value, kind: ir.Type) -> ir.Value:
    return code.load(pointer, typ=ir.VectorType(kind, LANES), align=1)


def _values(code: Code, form: PackedForm, pointer: ir.Value) -> list[ir.Value]:
    """The values of one input, or of two in 4 bits, as float32 vectors."""
    floats = ir.VectorType(FLOAT, LANES)
    if form.kind == "float32":
        return [_vector(code, pointer, FLOAT)]
    if form.kind == "bfloat16":
        words = ir.VectorType(ir.IntType(32), LANES)
        wide = code.zext(_vector(code, pointer, ir.IntType(16)), words)
        return [code.bitcast(code.shl(wide, ir.Constant(words, [16] * LANES)), floats)]
    packed = _vector(code, pointer, BYTE)
    if form.kind == "int8":
        return [code.sitofp(packed, floats)]
    if form.kind == "uint8":
        return [code.uitofp(packed, floats)]
    low, high = (ir.Constant(packed.type, [bits] * LANES) for bits in (15, 4))
    return [code.uitofp(part, floats) for part in (code.and_(packed, low), code.lshr(packed, high))]


def _tile_function(module: ir.Module, form: PackedForm, rows: int) -> ir.Function:
    """The product of some rows with the outputs of a block. Pointers are those of the first row and output."""
    kinds = [POINTER if name in _POINTERS else INT for name in _TILE_ARGUMENTS]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), f"tile_{rows}")
    function.linkage = "internal"
    for argument in function.args:
        if isinstance(argument.type, ir.PointerType):
            argument.add_attribute("noalias")
    code = Code(function.append_basic_block())
    given = dict(zip(_TILE_ARGUMENTS, function.args, strict=True))
    zeros = ir.Constant(ir.VectorType(FLOAT, LANES), [0.0] * LANES)
    inputs = [code.at(given["x"], INT(row * form.inputs)) for row in range(rows)]
    size = form.group or form.inputs
    at_once = 2 if form.kind == "uint4" else 1
    stride = int(LANES * at_once * _PACKED_BYTES[form.kind])  # bytes from one step to the next

    def group_sums(group: ir.Value) -> list[ir.Value]:
        start = code.at(given["values"], code.mul(group, INT(size // at_once * stride)), BYTE)
        own = [code.at(pointer, code.mul(group, INT(size))) for pointer in inputs]

        def add(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            step = code.mul(code.udiv(index, INT(at_once)), INT(stride))
            for offset, value in enumerate(_values(code, form, code.at(start, step, BYTE))):
                for row, pointer in enumerate(own):
                    x = code.load(code.at(pointer, code.add(index, INT(offset))), typ=FLOAT, align=4)
                    sums[row] = code.multiply_add(code.splat(x, LANES), value, sums[row])
            return sums

        return code.repeat(INT(size), [zeros] * rows, add, step=at_once)

    def add_group(group: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        sums, position = group_sums(group), code.mul(group, INT(LANES))
        scale = _vector(code, code.at(given["scales"], position), FLOAT)
        totals = [code.multiply_add(part, scale, total) for part, total in zip(sums, totals, strict=True)]
        if form.has_minimums:
            minimum = _vector(code, code.at(given["minimums"], position), FLOAT)
            for row in range(rows):
                own = code.add(group, code.mul(given["groups"], INT(row)))
                total = code.load(code.at(given["sums"], own), typ=FLOAT, align=4)
                totals[row] = code.multiply_add(code.splat(total, LANES), minimum, totals[row])
        return totals

    totals = code.repeat(given["groups"], [zeros] * rows, add_group) if form.group else group_sums(INT(0))
    for row, total in enumerate(totals):
        index = code.mul(code.mul(given["blocks"], INT(LANES)), INT(row))
        code.store(total, code.at(given["out"], index), align=4)
    code.ret_void()
    return function


def _read_arguments(code: Code, pointer: ir.Value) -> dict[str, ir.Value]:
    return {
        name: code.load(code.at(pointer, INT(index), INT), typ=POINTER if name in _POINTERS else INT)
        for index, name in enumerate(_ARGUMENTS)
    }


def _block_function(module: ir.Module, form: PackedForm, most_rows: int) -> None:
    """block(arguments, item): the product of all rows with `span` blocks, in tiles of rows."""
    tiles = [_tile_function(module, form, rows) for rows in range(1, most_rows + 1)]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, INT]), "block")
    code = Code(function.append_basic_block())
    given, item = _read_arguments(code, function.args[0]), function.args[1]
    start = code.mul(item, given["span"])
    some = code.sub(given["blocks"], start)
    some = code.select(code.icmp_unsigned("<", some, given["span"]), some, given["span"])
    code.repeat(some, [], lambda index, _: _compute_block(code, form, tiles, given, code.add(start, index)))
    code.ret_void()


def _compute_block(
    code: Code, form: PackedForm, tiles: Sequence[ir.Function], given: dict[str, ir.Value], block: ir.Value
) -> list[ir.Value]:
    place = code.mul(code.mul(block, given["groups"]), INT(LANES))
    own = given | {
        "values": code.at(
            given["values"], code.mul(block, INT(int(LANES * form.inputs * _PACKED_BYTES[form.kind]))), BYTE
        ),
        "scales": code.at(given["scales"], place),
        "minimums": code.at(given["minimums"], place),
        "out": code.at(given["out"], code.mul(block, INT(LANES))),
    }

    def compute_tile(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        first = code.mul(index, given["tile"])
        part = own | {
            "x": code.at(own["x"], code.mul(first, INT(form.inputs))),
            "sums": code.at(own["sums"], code.mul(first, given["groups"])),
            "out": code.at(own["out"], code.mul(first, code.mul(given["blocks"], INT(LANES)))),
        }
        left = code.sub(given["rows"], first)
        count = code.select(code.icmp_unsigned("<", left, given["tile"]), left, given["tile"])
        after = code.append_basic_block()
        switch = code.switch(count, after)
        for rows, tile in enumerate(tiles, start=1):
            case = code.append_basic_block()
            switch.add_case(INT(rows), case)
            code.position_at_end(case)
            code.call(tile, [part[argument] for argument in _TILE_ARGUMENTS])
            code.branch(after)
        code.position_at_end(after)
        return []

    return code.repeat(code.udiv(code.add(given["rows"], code.sub(given["tile"], INT(1))), given["tile"]), [], compute_tile)


def _sums_function(module: ir.Module, form: PackedForm) -> None:
    """The sums of each group of inputs, of all rows."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "sums")
    code = Code(function.append_basic_block())
    given = _read_arguments(code, function.args[0])

    def add(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        x = code.load(code.at(given["x"], code.mul(index, INT(form.group))), typ=ir.VectorType(FLOAT, form.group), align=4)
        code.store(code.total(x), code.at(given["sums"], index), align=4)
        return []

    code.repeat(code.mul(given["rows"], given["groups"]), [], add)
    code.ret_void()


def _most_rows() -> int:
    """The largest number of rows whose sums fit into the registers."""
    return 12 if has_feature("avx512f") else 6


@dataclass(frozen=True, slots=True)
class _Compiled:
    block: int
    sums: Any
    most_rows: int


@cache
def _compiled(form: PackedForm) -> _Compiled:
    module, most_rows = ir.Module("products"), _most_rows()
    _block_function(module, form, most_rows)
    if form.has_minimums:
        _sums_function(module, form)
    address = compiled(module)
    return _Compiled(address("block"), NATIVE_CALL(address("sums")) if form.has_minimums else None, most_rows)


class CompiledKernel:
    """A weight (N, K) in float32 or bfloat16, or of small integers, with inputs and outputs in float32."""

    def __init__(self, weight: Tensor | BlockWeight, bias: Tensor | None) -> None:
        self._bias, self._outputs = bias, weight.shape[0]
        if isinstance(weight, BlockWeight):
            unsigned = "uint4" if weight.bits <= 4 and weight.group % 2 == 0 else "uint8"
            kind = "int8" if weight.values.dtype == torch.int8 else unsigned
            self.form = PackedForm(kind, weight.shape[1], weight.group, weight.minimums is not None)
            self._scales = _in_lanes(weight.scales)
            self._minimums = None if weight.minimums is None else _in_lanes(weight.minimums)
            values = weight.values
            self._bits = weight.bits
        else:
            kind = "bfloat16" if weight.dtype == torch.bfloat16 else "float32"
            self.form = PackedForm(kind, weight.shape[1])
            self._scales, self._minimums, values = torch.empty(0), None, weight.detach()
        blocks = _in_lanes(values)  # (N / LANES, K, LANES)
        self._values = blocks[:, 0::2] | (blocks[:, 1::2] << 4) if kind == "uint4" else blocks
        self._code = _compiled(self.form)
        self._groups = self.form.inputs // self.form.group if self.form.group else 1
        self._width = len(blocks) * LANES  # of a row of outputs
        fixed = {"blocks": len(blocks), "groups": self._groups}
        fixed |= {"values": self._values.data_ptr(), "scales": self._scales.data_ptr()}
        if self._minimums is not None:
            fixed["minimums"] = self._minimums.data_ptr()
        self._words = _Words(*(fixed.get(name, 0) for name in _ARGUMENTS))
        self._address = ctypes.addressof(self._words)
        span = -(-len(blocks) // _ITEMS)
        self._words[_ARGUMENTS.index("span")], self._items = span, -(-len(blocks) // span)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.form.inputs).contiguous()
        count, words, most = len(rows), self._words, self._code.most_rows
        out = torch.empty(count, self._width)
        if not count:
            return out.view(*x.shape[:-1], -1)
        words[_X], words[_OUT], words[_ROWS] = rows.data_ptr(), out.data_ptr(), count
        words[_TILE] = -(-count // -(-count // most))  # tiles of nearly equal size
        if self._minimums is not None:
            sums = torch.empty(count, self._groups)
            words[_SUMS] = sums.data_ptr()
            self._code.sums(self._address)
        WORKERS.run(self._code.block, self._address, self._items)
        out = out[:, : self._outputs] if self._width != self._outputs else out
        out = out.view(*x.shape[:-1], -1) if x.dim() != 2 else out
        return out if self._bias is None else out.add_(self._bias)

    def weight(self) -> Tensor:
        """The original values, or those of rounded integers, in float32 or bfloat16."""
        values = self._values
        if self.form.kind == "uint4":
            values = torch.stack([values & 15, values >> 4], dim=2).flatten(1, 2)
        rows = values.transpose(1, 2).reshape(-1, self.form.inputs)[: self._outputs]
        if not self.form.group:
            return rows
        scales, minimums = (None if part is None else part.transpose(1, 2).reshape(-1, self._groups)[: self._outputs] for part in (self._scales, self._minimums))
        return BlockWeight(rows, scales, minimums, self.form.group, self._bits).dense()

    def tensors(self) -> Iterator[Tensor]:
        yield from (part for part in (self._values, self._scales, self._minimums, self._bias) if part is not None and part.numel())


def _in_lanes(rows: Tensor) -> Tensor:
    """(N, K) -> (N / LANES, K, LANES), with zeros for missing rows."""
    padded = pad(rows, (0, 0, 0, -len(rows) % LANES))
    return padded.view(-1, LANES, rows.shape[1]).transpose(1, 2).contiguous()


class JoinedKernels:
    """Weights that read the same input but are stored in different forms."""

    def __init__(self, kernels: Sequence[CompiledKernel]) -> None:
        self._kernels = list(kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([kernel(x) for kernel in self._kernels], dim=-1)

    def weight(self) -> Tensor:
        return torch.cat([kernel.weight() for kernel in self._kernels])

    def tensors(self) -> Iterator[Tensor]:
        for kernel in self._kernels:
            yield from kernel.tensors()


def compiled_builder(weights, layers):
    from utils.engine.module_swap import joined_bias
    from utils.engine.weight_blocks import joined

    def build(group):
        bias, is_head = joined_bias(group), any(id(layer.weight) in layers.heads for layer in group)
        forms = [weights.form(layers.names.get(id(layer), ""), layer.weight, is_head=is_head) for layer in group]
        if all(isinstance(form, Tensor) for form in forms) and len({form.dtype for form in forms}) == 1:
            return CompiledKernel(torch.cat(forms) if len(forms) > 1 else forms[0], bias)
        if all(isinstance(form, BlockWeight) for form in forms) and (block := joined(forms)) is not None:
            return CompiledKernel(block, bias)
        return JoinedKernels([CompiledKernel(form, layer.bias) for form, layer in zip(forms, group, strict=True)])

    return build
