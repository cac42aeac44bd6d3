"""What the results of an engine depend on, as one key: weights, configs, versions, source, processor and threads.

If anything of it changes, the key changes, and results that were stored under the old one are not used.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

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
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def result_key(models: Sequence[nn.Module], **options: object) -> str | None:
    """The key of results with these models and options, or None if the weights cannot be read here."""
    checksums: dict[tuple[int, torch.Size], int] = {}
    try:
        weights = [[*_weights(model, checksums)] for model in models]
    # Weights that accelerate keeps elsewhere, or unusual tensors.
    except (RuntimeError, TypeError, ValueError, KeyError):
        return None
    configs = [str(getattr(model, "config", "")) for model in models]
    facts = {"weights": weights, "configs": configs, "environment": environment(), "options": options}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


@cache
def environment() -> dict[str, Any]:
    """Versions, processor, threads and settings of the libraries."""
    machine = machine_facts()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "openvino": _version("openvino"),
        "source": source_digest(),
        "machine": [machine[name] for name in ("cpu", "cores", "threads", "gpus", "system")],
        # The libraries choose kernels by these. Virtual processors of one name may have different ones.
        "instructions": [torch.backends.cpu.get_cpu_capability(), *cpu_features()],
        "threads": available_threads(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def _version(package: str) -> str:
    """The version of a package, or an empty string if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def source_digest(folders: Sequence[Path] = SOURCE) -> str:
    """The version of the engine: a digest of the source that computes and tests."""
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _weights(model: nn.Module, checksums: dict[tuple[int, torch.Size], int]) -> Iterator[str]:
    """A line for each tensor of a model. checksums: of the tensors so far, because models share some."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if origin := getattr(tensor, "origin", ""):  # its data are in a file that an engine reads
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {origin}"
            continue
        for part in _plain(tensor.detach()):
            key = (part.data_ptr(), part.shape)
            if key not in checksums:
                checksums[key] = checksum(part)
            yield f"{name} {part.dtype} {tuple(part.shape)} {part.device} {checksums[key]}"


def checksum(tensor: Tensor) -> int:
    """The exclusive or of the bits of all elements. Raises RuntimeError if the tensor holds no data."""
    if tensor.is_meta:
        raise RuntimeError("a tensor without data")
    bits = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    return int(torch.hash_tensor(bits).view(torch.int64)) if bits.numel() else 0


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or the parts of a composed one, such as quantized data and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))
