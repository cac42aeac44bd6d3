"""Products with packed weights: how weights are packed, and the jobs that multiply with them."""

import mmap
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import cache
from math import prod
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn.functional import pad

from utils.engine.machine_code import (
    INT,
    POINTER,
    WORKERS,
    compiled,
    cpu_features,
    floats,
    item_function,
    job_list,
    words,
)
from utils.engine.matrix_tiles import STEP, has_tiles, matrix_tile, prepared_sizes, tile_functions, uses_tiles
from utils.engine.product_code import (
    ARGUMENTS,
    IN_WORD,
    LANES,
    PREPARED,
    WORDS,
    PackedForm,
    product_functions,
    rounded_at_once,
    tile_of,
)
from utils.engine.weight_blocks import BlockWeight, kind_of

_CALLS = 32  # numbers of rows whose jobs are kept
ITEMS = 32  # of a job, at most: few, because threads read long stretches of memory faster
_INPUTS, _OUT = ([*ARGUMENTS].index(name) for name in ("inputs", "out"))
_FACTORS = ("scales", "shifts", "factors")  # of a BlockWeight
_PAGE, _CHUNK = 2 << 20, 16 << 20  # bytes of a large page, and of the memory that is requested at once
_ALIGNMENT = 64
_PACK = {"rows": POINTER, "out": POINTER, "inputs": INT}


@cache
def _packing_function(bits: int, *, as_words: bool) -> int:
    """The address of pack(arguments, block) for values of so many bits, or for those of 4 bits in bytes."""
    kind = ir.IntType(64 if as_words else bits)
    module, vector = ir.Module("packing"), ir.VectorType(kind, LANES)
    stored = WORDS if as_words else vector
    code, given, block = item_function(module, "pack", _PACK)
    first = code.mul(block, code.mul(given["inputs"], INT(LANES)))
    rows, out = code.at(given["rows"], first, kind), code.at(given["out"], first, stored.element)

    def pack(index: ir.Value) -> None:
        values = ir.Constant(vector, ir.Undefined)
        for lane in range(LANES):
            place = code.add(index, code.mul(given["inputs"], INT(lane)))
            value = code.load(code.at(rows, place, kind), typ=kind, align=1)
            values = code.insert_element(values, value, ir.IntType(32)(lane))
        # Bytes of 4 bits move together: pairs of them, pairs of pairs, and all eight.
        for shift in (4, 8, 16) if as_words else ():
            field = sum((1 << 2 * shift) - 1 << 4 * shift * each for each in range(16 // shift))
            shifted = code.lshr(values, ir.Constant(vector, [shift] * LANES))
            values = code.and_(code.or_(values, shifted), ir.Constant(vector, [field] * LANES))
        values = code.trunc(values, stored) if as_words else values
        code.store(values, code.at(out, code.mul(index, INT(LANES)), stored.element), align=1)

    code.for_each(given["inputs"], pack)
    code.ret_void()
    return compiled(module, optimizes=False)("pack")


class _LargePages:
    """Memory for packed weights, in pages of 2 MB where the system allows them on request.

    A processor keeps the addresses of some thousand pages and looks up others in memory. A pass over all weights needs
    many more pages of 4 kB. Small tensors share chunks. A chunk is given back when its last tensor is.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with any values, aligned to _ALIGNMENT bytes. Raises MemoryError."""
        size = prod(shape) * dtype.itemsize
        if size > _CHUNK // 4:
            return self._chunk(size).view(dtype).view(*shape)
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT
        with WORKERS.lock:
            if whole > len(self._rest):
                self._rest = self._chunk(_CHUNK)
            own, self._rest = self._rest[:size], self._rest[whole:]
        return own.view(dtype).view(*shape)

    @staticmethod
    def _chunk(size: int) -> Tensor:
        try:
            memory = mmap.mmap(-1, size + _PAGE, access=mmap.ACCESS_COPY)  # private to this process
        except OSError as error:
            raise MemoryError(str(error)) from None
        chunk = torch.frombuffer(memory, dtype=torch.uint8)
        start = -chunk.data_ptr() % _PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # not every kernel has them
                memory.madvise(mmap.MADV_HUGEPAGE, start, size // _PAGE * _PAGE)
        return chunk[start : start + size]


_LARGE_PAGES = _LargePages()


def _in_lanes(parts: Sequence[Tensor], *, as_words: bool = False) -> Tensor:
    """Weights (N, K) below each other -> (N / LANES, K, LANES), with zeros for missing rows. as_words: values of 4 bits
    become words of IN_WORD adjacent inputs, the first one in the lowest bits: (N / LANES, K / IN_WORD, LANES).
    """
    if any(len(part) % LANES for part in parts):
        whole = torch.cat([*parts])
        parts = [pad(whole, (0, 0, 0, -len(whole) % LANES))]
    inputs = parts[0].shape[1] // (IN_WORD["uint4"] if as_words else 1)
    blocks = [len(part) // LANES for part in parts]
    dtype = torch.int32 if as_words else parts[0].dtype
    out = _LARGE_PAGES.empty((sum(blocks), inputs, LANES), dtype)
    pack = _packing_function(8 * parts[0].itemsize, as_words=as_words)
    for own, part, count in zip(out.split(blocks), map(Tensor.contiguous, parts), blocks, strict=True):
        arguments = words(_PACK, rows=part, out=own, inputs=inputs)
        WORKERS.run(*job_list([(pack, arguments, count)]))
    return out


def _supported(values: Tensor) -> Tensor:
    """The values in a format that the processor reads. Old x86 processors have no instructions for float16."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return values.float() if values.dtype == torch.float16 and is_x86 and "f16c" not in cpu_features() else values


class CompiledKernel:
    """Weights (N, K) in float32, bfloat16 or float16, or of small integers of one form, row below row. Inputs and
    outputs are float32. sizes: the number of outputs of each weight.
    """

    def __init__(self, weights: Sequence[Tensor | BlockWeight], bias: Tensor | None) -> None:
        self.sizes, self.inputs = [weight.shape[0] for weight in weights], weights[0].shape[1]
        self.outputs = sum(self.sizes)
        self._bits = offset = rounded = 0
        packed = dict[str, Tensor]()
        blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
        if blocks and not rounded_at_once(blocks[0].group):
            weights, blocks = [block.dense() for block in blocks], []
        if blocks:
            first, values = blocks[0], [block.values for block in blocks]
            self._bits, group, offset, rounded = first.bits, first.group, first.offset, rounded_at_once(first.group)
            unsigned = "uint4" if first.bits <= 4 and group % IN_WORD["uint4"] == 0 else "uint8"
            kind = "int8" if first.values.dtype == torch.int8 else unsigned
            if kind != "uint4":
                values = [part.contiguous().view(torch.int32) for part in values]
            names = [name for name in _FACTORS if getattr(first, name) is not None]
            packed = {name: _in_lanes([_supported(getattr(block, name)) for block in blocks]) for name in names}
        else:
            values = [_supported(weight.detach()) for weight in weights if isinstance(weight, Tensor)]
            kind, group = kind_of(values[0]), self.inputs
        scales = kind_of(packed["scales"]) if blocks else "float32"
        has_shifts, has_bias = "shifts" in packed, bias is not None
        has_pairs = kind == "bfloat16" and self.inputs % STEP == 0 and has_tiles()
        self._group, self._groups = group, self.inputs // group
        supers = packed["factors"].shape[1] // (1 + has_shifts) if "factors" in packed else 0
        self.form = PackedForm(
            *(kind, rounded, rounded == group, scales, offset, has_shifts, has_bias, has_pairs),
            in_super=self._groups // supers if supers else 0,
        )
        values = [part.contiguous().view(torch.int32) for part in values] if has_pairs else values
        self._values = _in_lanes(values, as_words=kind == "uint4")
        self.width = len(self._values) * LANES
        self._packed = {"values": self._values} | packed  # by the names of their arguments
        if bias is not None:
            self._packed["bias"] = pad(bias.detach().float(), (0, self.width - len(bias))).contiguous()
        self._calls: dict[int, tuple[tuple[Any, int], Any]] = {}  # jobs and their arguments, by number of rows
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.inputs).float().contiguous()
        count, out = len(rows), floats(len(rows), self.width)
        if count:
            scratch = floats(self.scratch_size(count))
            with WORKERS.lock:
                jobs, arguments = self._call(count)
                arguments[_INPUTS], arguments[_OUT] = rows.data_ptr(), out.data_ptr()
                for place, part in self._scratch_parts(rows, scratch, count).items():
                    arguments[[*ARGUMENTS].index(place)] = part.data_ptr()
                WORKERS.run(*jobs)
        return out[:, : self.outputs].view(*x.shape[:-1], self.outputs) if x.dim() != 2 else out[:, : self.outputs]

    def output(self, x: Tensor, index: int) -> Tensor:
        """Return the product of x (..., K) with one of the weights. The first one computes all products; the others
        take theirs.
        """
        # A different tensor means a new forward pass. The stored reference keeps its identity from being reused.
        if x is not self._input:
            self._input, self._outputs = x, torch.split_with_sizes(self(x), self.sizes, dim=-1)
        own = self._outputs[index]
        if index == len(self.sizes) - 1:  # the last layer to run releases the tensors
            self._input, self._outputs = None, ()
        return own

    def first(self, outputs: int) -> "CompiledKernel":
        """The product with the first rows of the same weight."""
        part = copy(self)
        part.outputs, part.width = min(outputs, self.outputs), min(-(-outputs // LANES) * LANES, self.width)
        part._calls = {}
        return part

    def _call(self, rows: int) -> tuple[tuple[Any, int], Any]:
        """The jobs of a call with so many rows, and their arguments, which name no tensors yet."""
        if rows not in self._calls:
            self._calls = {} if len(self._calls) >= _CALLS else self._calls
            nothing = floats(0)
            scratch = floats(self.scratch_size(rows))
            jobs = self.jobs(nothing, nothing, rows, stride=self.width, scratch=scratch)
            self._calls[rows] = job_list(jobs), jobs[0][1]
        return self._calls[rows]

    def scratch_size(self, rows: int) -> int:
        """Values that products with up to so many rows write on the way: prepared inputs."""
        return sum(self._prepared(rows))

    def _prepared(self, rows: int) -> list[int]:
        if uses_tiles(self.form, rows, self._groups):
            return prepared_sizes(self.form, self.inputs, rows, self._groups)
        return self.form.prepared(rows * self.inputs, rows * self._groups)

    def _scratch_parts(self, x: Tensor, scratch: Tensor, rows: int) -> dict[str, Tensor]:
        """What is in scratch memory, and where prepared inputs are, which may be x itself."""
        sizes = self._prepared(rows)
        parts = dict(zip(PREPARED, scratch[: sum(sizes)].split(sizes), strict=True))
        return parts if sizes[0] else parts | {"x": x}

    def jobs(self, x: Tensor, out: Tensor, rows: int, *, stride: int, scratch: Tensor) -> list[tuple[int, Any, int]]:
        """The jobs of a product of x (rows, K), contiguous, to the first `width` columns of out, whose rows are
        `stride` values apart. All tensors must live as long as the jobs.
        """
        blocks, tiled = self.width // LANES, uses_tiles(self.form, rows, self._groups)
        tile_rows, tile_blocks = matrix_tile(self.form, rows) if tiled else tile_of(self.form, rows, blocks)
        block, prepare = (tile_functions if tiled else product_functions)(self.form)
        span = -(-blocks // (ITEMS * tile_blocks)) * tile_blocks
        arguments = words(
            ARGUMENTS,
            **self._scratch_parts(x, scratch, rows),
            **self._packed,
            inputs=x,
            out=out,
            out_stride=stride,
            length=self.inputs,
            group=self._group,
            groups=self._groups,
            blocks=blocks,
            rows=rows,
            span=span,
            tile_rows=tile_rows,
            tile_blocks=tile_blocks,
        )
        first = [(prepare, arguments, rows)] if prepare else []
        return [*first, (block, arguments, -(-blocks // span))]

    def weight(self) -> Tensor:
        """The original values, or those of rounded integers, in float32."""
        values = self._values
        if self.form.kind == "uint4":
            values = torch.stack([values >> 4 * place & 15 for place in range(self.form.in_word)], dim=2).flatten(1, 2)
        elif self.form.rounded:
            kind = torch.int8 if self.form.kind == "int8" else torch.uint8
            values = self._spread(kind)
        elif self.form.has_pairs:
            values = self._spread(torch.bfloat16)
        rows = self._in_rows(values)
        if not self.form.rounded:
            return rows.float()
        parts = {name: self._in_rows(self._packed[name]) for name in _FACTORS if name in self._packed}
        shifts, factors = parts.get("shifts"), parts.get("factors")
        return BlockWeight(rows, parts["scales"], shifts, self._group, self._bits, self.form.offset, factors).dense()

    def _spread(self, kind: torch.dtype) -> Tensor:
        """The values of words of inputs, (N / LANES, K, LANES)."""
        values: Tensor = self._values.view(kind).unflatten(2, (LANES, self.form.in_word))
        return values.transpose(2, 3).flatten(1, 2)

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows (T, K) of a weight that is not rounded, for ids (T,), in float32."""
        values = self._values[ids // LANES, :, ids % LANES]
        return values.view(torch.bfloat16).float() if self.form.has_pairs else values.float()

    def tensors(self) -> Iterator[Tensor]:
        yield from self._packed.values()

    def _in_rows(self, blocks: Tensor) -> Tensor:
        return blocks.transpose(1, 2).flatten(0, 1)[: self.outputs]
