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
# A group's files with its limit and its usage, in version 2 and 1 of control groups.
LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


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
    """Yield the memory that the limits of control groups leave. Cached files count as free."""
    for group in _control_groups():
        for limit, usage in LIMIT_FILES:
            try:
                maximum, used = (int((group / name).read_text()) for name in (limit, usage))
                values = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # the file does not exist, or there is no limit
                continue
            names = ("inactive_file", "active_file")
            files = sum(int(values.get(f"total_{name}", values.get(name, 0))) for name in names)
            yield max(0, maximum - used + files)


def _control_groups() -> Iterator[Path]:
    """Yield the folders of this process's control groups and of those above them, whose limits hold as well."""
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                root = CONTROL_GROUPS / controllers
                group = root / path.strip("/")
                # In a container the path may be that of the host, and the limit that of the root.
                yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))
