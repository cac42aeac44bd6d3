"""What this machine is, as records and reports name it, and the numbers of threads that it can compute with.

More threads stream weights faster, but every small matrix product has to synchronize all of them. Which number is the
fastest depends on the model, the machine and its other load, so engines are measured with each of them.
"""

import os
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
AVAILABLE_THREADS = torch.get_num_threads()  # at import: the number of cores, or OMP_NUM_THREADS


def requested_threads() -> int:
    """Return the number of threads that the environment asks for, or 0."""
    return AVAILABLE_THREADS if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ else 0


def candidate_threads(available: int = AVAILABLE_THREADS) -> list[int]:
    """Return the numbers of threads to try: the powers of two, and all."""
    return sorted({*(2**power for power in range(available.bit_length())), available})


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
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []  # on Linux
    names = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    named = next((names[key] for key in CPU_KEYS if names.get(key)), "")
    return named or platform.processor() or platform.machine() or "unknown"


def _gpus() -> Iterator[str]:
    if torch.cuda.is_available():
        yield from map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    elif sys.platform == "darwin" and torch.backends.mps.is_available():
        yield "Apple GPU"
