"""Keep the weights of modules in files while another engine computes from copies of its own.

The modules stay usable: pages that they read come back from the file. Only Linux tells which tensors are in files.
"""

import ctypes
import mmap
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

MAPS = Path("/proc/self/smaps")


@dataclass(frozen=True, slots=True)
class MappedRange:
    """A part of a file in this process's memory. changed: whether pages of it have been changed in memory only."""

    start: int
    end: int
    path: str
    changed: bool


def mapped_ranges() -> Iterator[MappedRange]:
    """Every mapped part of a file. Nothing elsewhere than on Linux."""
    if sys.platform != "linux":
        return
    span, path = (0, 0), ""
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        name, *values = line.split(maxsplit=5)
        if not name.endswith(":"):  # the first line of a range: bounds, access, offset, device, inode, file
            start, end = (int(bound, 16) for bound in name.split("-"))
            span, path = (start, end), values[4] if len(values) > 4 else ""
        elif name == "Anonymous:" and path.startswith("/"):
            yield MappedRange(*span, path, changed=values[0] != "0")


def drop_pages(start: int, length: int) -> None:
    """Return the memory of a range of a mapped file, whose pages are read again when they are needed. Changes that
    were not written to the file are lost. start: a multiple of the page size.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(start, length, mmap.MADV_DONTNEED)


def release_weights(models: Iterable[nn.Module], folder: Path | None = None) -> None:
    """Free the memory of all linear weights on the CPU that no embedding holds as well.

    folder: for the files, which are removed with the weights; None: the folder for temporary files. Elsewhere than on
    Linux, and if files cannot be written, the weights stay in memory.
    """
    if sys.platform != "linux":
        return
    ranges = [*mapped_ranges()]
    for weight in _weights(models):
        if not _is_mapped(weight, ranges):
            try:
                weight.data = _in_file(weight, folder)
            except OSError:
                return
        drop_pages(*_whole_pages(weight))


def _weights(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    parts = [part for model in models for part in model.modules()]
    embedded = {part.weight.data_ptr() for part in parts if isinstance(part, nn.Embedding)}
    linears = {id(part.weight): part.weight for part in parts if type(part) is nn.Linear}
    for weight in linears.values():
        if weight.device.type == "cpu" and weight.data_ptr() not in embedded and weight.is_contiguous():
            yield weight


def _is_mapped(tensor: Tensor, ranges: Sequence[MappedRange]) -> bool:
    """Whether a tensor lies in a mapped file, as it is there."""
    return any(part.start <= tensor.data_ptr() < part.end and not part.changed for part in ranges)


def _in_file(tensor: Tensor, folder: Path | None) -> Tensor:
    """A copy of the tensor in a file that is removed with it."""
    bits = tensor.detach().view(torch.uint8).numpy()  # bfloat16 has no counterpart in NumPy
    with tempfile.TemporaryFile(prefix="weights-", dir=folder) as file:
        bits.tofile(file)
        file.flush()
        mapped = np.memmap(file, dtype=np.uint8, mode="r", shape=bits.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the tensor must not be written to
        return torch.from_numpy(mapped).view(tensor.dtype).view(tensor.shape)


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """Address and length of the pages that hold nothing but this tensor."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return start, max(0, end - start)
