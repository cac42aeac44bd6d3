"""How much memory is free, and returning freed memory to the operating system."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

# The files of a container's memory limit, usage and statistics, for version 2 and 1 of control groups.
CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


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
    """Yield the memory that the limits of a container leave. Cached files count as free."""
    for limit, usage, statistics in CONTROL_GROUPS:
        try:
            maximum, used = (int(Path(path).read_text()) for path in (limit, usage))
            values = dict(line.split() for line in Path(statistics).read_text().splitlines())
        except (OSError, ValueError):  # the group does not exist, or has no limit
            continue
        files = sum(int(values.get(name, values.get(f"total_{name}", 0))) for name in ("inactive_file", "active_file"))
        yield max(0, maximum - used + files)
