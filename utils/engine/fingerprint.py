"""What the results of an engine depend on besides the models, as one key: versions, source, processor and threads.

If anything of it changes, the key changes, and results that were stored under the old one are not used.
"""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from utils.engine.machine import cpu_features, machine_facts
from utils.engine.threads import available_threads

ROOT = Path(__file__).parents[2]
# What computes and tests, and the drafters, whose times are stored too.
SOURCE = tuple(ROOT / folder for folder in ("utils/engine", "utils/decode", "utils/pairs", "sampling"))
# Variables that change how, or with how many threads, kernels compute.
VARIABLES = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "ATEN_", "OPENBLAS_", "BLIS_", "TORCH_", "PYTORCH_"),
    *("CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_TF32", "LD_PRELOAD"),
)


def result_key(models: str, **options: object) -> str:
    """The key of results. models: identifies the files of all models."""
    facts = {"models": models, "environment": environment(), "options": options}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode(errors="replace")).hexdigest()


@cache
def environment() -> dict[str, Any]:
    """Versions, processor, threads and settings of the libraries."""
    machine = machine_facts()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "llvmlite": version("llvmlite"),
        "source": source_digest(),
        "machine": [machine[name] for name in ("cpu", "cores", "threads", "gpus", "system")],
        # The libraries choose kernels by these. Virtual processors of one name may have different ones.
        "instructions": [torch.backends.cpu.get_cpu_capability(), *cpu_features()],
        "threads": available_threads(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def source_digest(folders: Sequence[Path] = SOURCE) -> str:
    """The version of the engine: a digest of the source that computes and tests."""
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
