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
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_VERSION_2 = ("memory.max", "memory.current", "")


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
    """Yield the memory that the limits of the process's control groups leave. Cached files count as free."""
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            number, kinds, own = line.split(":", 2)
            if number == "0" or "memory" in kinds.split(","):  # version 2, or the groups of version 1 for memory
                names, root = (_VERSION_2, CONTROL_GROUPS) if number == "0" else (_VERSION_1, CONTROL_GROUPS / "memory")
                group = root / own.strip("/")  # in a container the path may be that of the host
                yield from (left for folder in (group, *group.parents) for left in _left(folder, *names))


def _left(group: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    """Yield what the limit of one control group leaves, if it has one. The arguments are names of its files, and the
    prefix of the names of cached files in its statistics.
    """
    with suppress(OSError, ValueError):  # without a limit there is no file, or it holds a word
        size = int((group / limit).read_text())
        values = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = sum(int(values.get(f"{cached}{kind}_file", 0)) for kind in ("inactive", "active"))
        yield max(0, size - int((group / used).read_text()) + files)
