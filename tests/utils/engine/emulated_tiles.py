"""The instructions of `matrix_tiles` in Python, for processors that do not have them."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llvmlite import ir

from utils.engine import compiled_products, matrix_tiles
from utils.engine.machine_code import INT, Code, cpu_features

NAMES = ["ldtilecfg", "tilerelease", "tilezero", "tileloadd64", "tilestored64", "tdpbf16ps"]
NAMES += [f"tdpb{signs}d" for signs in ("ss", "su", "us", "uu")]
_OPERANDS = 3
_Call = ctypes.CFUNCTYPE(None, ctypes.c_int64, *[ctypes.c_int64] * _OPERANDS)
_of_thread = threading.local()  # shapes and tiles


def _memory(address: int, size: int) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def _lines(tile: int, address: int, stride: int) -> list[np.ndarray[Any, Any]]:
    """The memory of each row of a tile."""
    rows, width = _of_thread.shapes[tile]
    return [_memory(address + row * stride, width) for row in range(rows)]


def _quads(tile: int, kind: str) -> np.ndarray[Any, Any]:
    """A tile of bytes: (rows, words, 4), as int64."""
    values = _of_thread.tiles[tile].view(np.int8 if kind == "s" else np.uint8)
    return values.reshape(len(values), -1, 4).astype(np.int64)


def _floats(tile: int) -> np.ndarray[Any, Any]:
    """A tile of bfloat16: (rows, words, 2), as float64."""
    halves = _of_thread.tiles[tile].view(np.uint16).astype(np.uint32) << 16
    return halves.view(np.float32).reshape(len(halves), -1, 2).astype(np.float64)


def _run(code: int, first: int, second: int, third: int) -> None:
    name = NAMES[code]
    if name == "ldtilecfg":
        shape = _memory(first, 64)
        _of_thread.shapes = [(int(shape[48 + tile]), int(shape[16 + 2 * tile])) for tile in range(8)]
        _of_thread.tiles = [np.zeros(shape, np.uint8) for shape in _of_thread.shapes]
    elif name == "tilerelease":
        del _of_thread.tiles, _of_thread.shapes
    elif name == "tilezero":
        _of_thread.tiles[first][:] = 0
    elif name == "tileloadd64":
        for row, line in zip(_of_thread.tiles[first], _lines(first, second, third), strict=True):
            row[:] = line
    elif name == "tilestored64":
        for row, line in zip(_of_thread.tiles[first], _lines(first, second, third), strict=True):
            line[:] = row
    elif name == "tdpbf16ps":
        with np.errstate(all="ignore"):
            sums = _of_thread.tiles[first].view(np.float32)
            sums += np.einsum("mkp,knp->mn", _floats(second), _floats(third)).astype(np.float32)
    else:
        product = np.einsum("mkp,knp->mn", _quads(second, name[4]), _quads(third, name[5]))
        _of_thread.tiles[first].view(np.int32)[:] += product.astype(np.int32)


_callback = _Call(_run)


def _tile(code: Code, name: str, *values: ir.Value) -> None:
    """In place of `Code.tile`: call the emulation."""
    operands = [code.ptrtoint(value, INT) if isinstance(value.type, ir.PointerType) else value for value in values]
    operands = [code.zext(value, INT) if value.type != INT else value for value in operands]
    operands += [INT(0)] * (_OPERANDS - len(operands))
    kind = ir.PointerType(ir.FunctionType(ir.VoidType(), [INT] * (1 + _OPERANDS)))
    address = ctypes.cast(_callback, ctypes.c_void_p).value
    code.call(code.inttoptr(INT(address), kind), [INT(NAMES.index(name)), *operands])


def _entries(code: Code, table: Sequence[int], places: ir.Value) -> ir.Value:
    """In place of `Code.entries`."""
    places, found = code.and_(places, code.like(places, len(table) - 1)), code.like(places, 0)
    for place, value in enumerate(table):
        found = code.select(code.icmp_unsigned("==", places, code.like(places, place)), code.like(places, value), found)
    return found


def use_tiles(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """Let kernels that are built from now on use tiles, emulated ones, or none."""
    for module in (compiled_products, matrix_tiles):
        monkeypatch.setattr(module, "has_tiles", lambda: used)
    if used:
        monkeypatch.setattr(Code, "tile", _tile)
        if "avx512bw" not in cpu_features():
            monkeypatch.setattr(Code, "entries", _entries)
        fresh: Callable[..., Any] = matrix_tiles.tile_functions.__wrapped__
        monkeypatch.setattr(compiled_products, "tile_functions", fresh)
