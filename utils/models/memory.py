"""Where models are loaded and in which number format, and whether they fit into memory.

Linux promises memory freely and then kills the program in the middle of a load. So the weights are counted first, and
a model that does not fit is refused together with a smaller form that does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from gguf import GGUFReader

from utils.bounds import check_device
from utils.engine.weight_format import BYTES
from utils.errors import UserError
from utils.freed_memory import available_memory, release_memory
from utils.models import Reporter
from utils.models.sources import Source, checkpoint_folder, stored_tensors, weight_files
from utils.text import byte_size

# Bytes per weight by safetensors format. All other formats are packed, and stay packed after loading.
FORMATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PACKED = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
# Bytes per weight if quantized while loading. optimum-quanto quantizes a model that is loaded completely.
QUANTIZED_ON_LOADING = {"bnb-int8": 1.0, "nf4": 0.5}
MARGIN = 0.25  # share of its weights that a model needs besides them, roughly


@dataclass(frozen=True, slots=True)
class Placement:
    """Where models are loaded, in which number format, and who receives progress lines.

    With `may_spread`, layers may be spread over all GPUs and the CPU if one GPU has not enough memory. `engine_weights`
    is the format in which engines will compute the weights.
    """

    device: str
    dtype: torch.dtype | str
    report: Reporter
    may_spread: bool = False
    engine_weights: str = "float32"


def choose_device(name: str) -> str:
    """Return a device that exists. `auto` is CUDA, else MPS, else the CPU. Raises UserError for any other name."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    # torch would raise only at the first transfer, after minutes of loading.
    check_device(name)
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("This machine has no mps device: omit the device, or use cpu.")
    if name.startswith("cuda"):
        if (count := torch.cuda.device_count()) == 0:
            raise UserError("This machine has no usable CUDA device: omit the device, or use cpu.")
        if int(name.partition(":")[2] or 0) >= count:
            raise UserError(f"{name} does not exist: this machine has cuda:0 to cuda:{count - 1}.")
    return name


def choose_dtype(name: str, device: str) -> torch.dtype | str:
    """Return a torch dtype. `auto` is float32 on the CPU and "auto", the checkpoint's own format, elsewhere."""
    # 16-bit products are emulated on CPUs without such instructions, and a verify pass does not get cheaper.
    if name == "auto":
        return torch.float32 if device == "cpu" else "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def weight_counts(source: Source) -> dict[str, int]:
    """Return the number of weights by safetensors format, or nothing if it is unknown.

    Raises UserError if the index of the weights names files outside of its folder.
    """
    if source.weight_counts:
        return dict(source.weight_counts)
    counts: Counter[str] = Counter()
    try:
        if source.gguf:  # counted as they are unpacked
            tensors = GGUFReader(Path(source.location, source.gguf)).tensors
            return {"F32": sum(int(tensor.n_elements) for tensor in tensors)}
        folder = checkpoint_folder(source)
        for path in filter(Path.is_file, weight_files(folder) if folder else ()):
            for tensor in stored_tensors(path):
                counts[tensor.kind] += prod(tensor.shape)
    except UserError:
        raise
    except Exception:  # whatever damaged files lead to: loading will report it
        return {}
    return dict(counts)


def needed_bytes(counts: Mapping[str, int], dtype: torch.dtype | str, kind: str) -> int:
    """Return the minimum memory for these weights in a number format and a quantization."""
    # None if the checkpoint chooses the format: then every weight keeps its own.
    size = QUANTIZED_ON_LOADING.get(kind) or (dtype.itemsize if isinstance(dtype, torch.dtype) else None)
    # A stored integer holds several packed weights, and stays as large in memory.
    sizes = {name: (size or FORMATS[name]) if name in FORMATS else PACKED.get(name, 1) for name in counts}
    return int(sum(count * sizes[name] for name, count in counts.items()))


def free_bytes(device: str) -> int:
    """Return the free memory of a device, as far as it is known."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    if device == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return available_memory()


def check_free(name: str, needed: int, device: str, remedy: str) -> None:
    """Raise UserError if the weights of a model do not fit into the free memory of a device."""
    if (free := free_bytes(device)) < needed:
        raise UserError(
            f"'{name}' needs {byte_size(needed)} of memory for its weights and {byte_size(free)} are free: {remedy}."
        )


def plan_memory(source: Source, kind: str, where: Placement, *, in_files: bool = False) -> tuple[int, bool]:
    """The minimum bytes for the weights, 0 if unknown, and whether they must be spread over several devices, because
    one is too small. Raises UserError if they do not fit anywhere.

    With `in_files`, they may stay in their files until an engine reads them, in its own format.
    """
    counts = weight_counts(source)
    needed = needed_bytes(counts, where.dtype, kind)
    in_files &= kind == "none" and where.device == "cpu"
    if in_files and where.engine_weights in BYTES:
        needed = min(needed, int(BYTES[where.engine_weights] * sum(counts.values())))
    elif in_files:  # engines keep the format of the file where it is smaller
        needed = min(needed, needed_bytes(counts, "auto", kind))
    if free_bytes(where.device) < needed:
        release_memory()  # models that are no longer used may still be held by reference cycles
    if where.may_spread and where.device.startswith("cuda") and kind == "none" and free_bytes(where.device) < needed:
        devices = [*(f"cuda:{number}" for number in range(torch.cuda.device_count())), "cpu"]
        if needed <= sum(map(free_bytes, devices)):
            return needed, True
    # bitsandbytes does not run on mps, and packed weights cannot be quantized again.
    quantizable = where.device != "mps" and kind == "none" and set(counts) <= set(FORMATS)
    check_free(source.name, needed, where.device, _remedy(counts, where.device, in_files=in_files, smaller=quantizable))
    return needed, False


def _remedy(counts: Mapping[str, int], device: str, *, in_files: bool, smaller: bool) -> str:
    """The smaller forms that fit. `smaller` is True if the weights can be quantized."""
    is_stored_in_16_bits = in_files and not {"F32", "F64"} & set(counts)
    sizes = {} if is_stored_in_16_bits else {"--dtype bfloat16": needed_bytes(counts, torch.bfloat16, "none")}
    if in_files:
        total = sum(counts.values())
        sizes |= {f"--engine-weights {format}": int(BYTES[format] * total) for format in ("int8", "int4")}
    elif smaller:
        sizes |= {f"--quantize {kind}": needed_bytes(counts, torch.bfloat16, kind) for kind in QUANTIZED_ON_LOADING}
    free = free_bytes(device)
    # Drafters, keys and values need memory as well.
    fitting = [f"{option} ({byte_size(size)})" for option, size in sizes.items() if size * (1 + MARGIN) <= free]
    return f"use {' or '.join(fitting)}" if fitting else "use a smaller model, or a different --device"
