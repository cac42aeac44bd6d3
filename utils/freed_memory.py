"""How much memory is free, and returning freed memory to the operating system."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

CONTROL_GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def release_memory() -> None:
    """Collect garbage and return freed memory, which glibc and torch would otherwise keep for the process."""
    gc.collect()  # models contain reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_allocator()


def trim_allocator() -> None:
    """Return memory that glibc keeps after it was freed."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library other than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def available_memory() -> int:
    """The bytes of memory that are free, as far as it is known, within the limits of a container."""
    return min([int(psutil.virtual_memory().available), *_container_limits()])


def _container_limits() -> Iterator[int]:
    """Yield the memory that the limits of this process's control group (version 2), and of those above it, leave.
    Cached files count as free.
    """
    with suppress(OSError, ValueError, StopIteration):
        own = next(line[3:] for line in OWN_GROUPS.read_text().splitlines() if line.startswith("0::"))
        group = CONTROL_GROUPS / own.strip("/")  # in a container the path may be that of the host
        for folder in (group, *group.parents):
            if (folder / "memory.max").is_file() and (limit := (folder / "memory.max").read_text().strip()) != "max":
                values = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                files = sum(int(values.get(name, 0)) for name in ("inactive_file", "active_file"))
                yield max(0, int(limit) - int((folder / "memory.current").read_text()) + files)
