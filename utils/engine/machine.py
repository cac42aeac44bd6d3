"""What this machine is: processor, cores, memory and GPUs, as records and reports name it."""

import platform
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

CPU_INFO = Path("/proc/cpuinfo")  # Linux
CPU_KEYS = ("model name", "Hardware", "cpu model", "Model")  # the first one that names a processor, by architecture
FEATURE_KEYS = ("flags", "Features")
# The files of a container's memory limit, usage and statistics, for version 2 and 1 of control groups.
CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


@cache
def machine_facts() -> dict[str, Any]:
    """The machine as plain values.

    cpu: its model. cores: physical, threads: logical, None if unknown. memory: in bytes. gpus: their names. system: of
    the operating system.
    """
    return {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "gpus": list(_gpus()),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_model(info: Path = CPU_INFO) -> str:
    """The name of the processor, or of its architecture if that is all that is known."""
    names = _first_processor(info)
    named = next((names[key] for key in CPU_KEYS if names.get(key)), "")
    return named or platform.processor() or platform.machine() or "unknown"


def cpu_features(info: Path = CPU_INFO) -> list[str]:
    """The instruction sets of the processor and the like, sorted. Empty if they are not known."""
    names = _first_processor(info)
    return sorted(" ".join(names.get(key, "") for key in FEATURE_KEYS).split())


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


def _first_processor(info: Path) -> dict[str, str]:
    try:
        lines = [line.partition(":") for line in info.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        lines = []  # not Linux
    return {key.strip(): value.strip() for key, _, value in reversed(lines)}


def _gpus() -> Iterator[str]:
    if torch.cuda.is_available():
        yield from map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    elif sys.platform == "darwin" and torch.backends.mps.is_available():
        yield "Apple GPU"
