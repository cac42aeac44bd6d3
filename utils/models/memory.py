"""Whether a model will fit into memory, known before any of it is read.

Where memory is promised freely, as on Linux, nobody is told that it does not suffice: the system ends the program in the middle of a load,
and the session with it. So the weights are counted first, and what would not fit is refused together with what would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open

from utils.distributed import number_of
from utils.errors import UserError
from utils.freed_memory import give_back_memory
from utils.models.devices import Placement
from utils.models.hub import kept_folder
from utils.models.sources import Source
from utils.units import in_units

FORMATS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
}  # of safetensors, bytes each; what else there is comes packed and stays so
PACKED = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
ON_LOADING = {
    "bnb-int8": 1.0,
    "nf4": 0.5,
}  # bytes per weight; quanto's kinds are made from a model that is there as a whole
CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    *(tuple(f"/sys/fs/cgroup/memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),),
)


def weight_counts(source: Source) -> dict[str, int]:
    """How many numbers of each safetensors format its weights are; nothing where that cannot be told."""
    if source.counts:
        return dict(source.counts)
    kept = kept_folder(source.place, source.hub.get("revision")) if source.hub is not None else Path(source.place)
    counts: dict[str, int] = {}
    try:
        for path in filter(Path.is_file, _files(kept) if kept else ()):
            with safe_open(path, framework="pt") as file:
                for part in map(file.get_slice, file.keys()):
                    counts[part.get_dtype()] = counts.get(part.get_dtype(), 0) + _product(part.get_shape())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return {}  # damaged: loading will say how
    return counts


def needed_bytes(counts: Mapping[str, int], dtype: torch.dtype | str, kind: str) -> int:
    """Of memory, at the least, for so many weights in this number format and quantization."""
    size = ON_LOADING.get(kind) or (dtype.itemsize if isinstance(dtype, torch.dtype) else None)
    return int(
        sum(
            count * ((size or FORMATS[name]) if name in FORMATS else PACKED.get(name, 1))
            for name, count in counts.items()
        )
    )


def free_bytes(device: str) -> int | None:
    """Of memory for models, as far as that can be known."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    if device == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min([psutil.virtual_memory().available, *_group_rooms()])


@dataclass(frozen=True, slots=True)
class Room:
    """needed: bytes of the weights at the least, 0 where they are not known. spread: over several devices, since one has not so many."""

    needed: int
    spread: bool = False


def find_room(source: Source, kind: str, where: Placement) -> Room:
    """Where the weights will fit. Raises UserError where they will not."""
    counts = weight_counts(source)
    needed = needed_bytes(counts, where.dtype, kind) // (number_of() if where.parted else 1)
    free = free_bytes(where.device)
    if free is not None and free < needed:
        give_back_memory()
        free = free_bytes(where.device)
    if free is None or needed <= free:
        return Room(needed)
    if where.layered and where.device.startswith("cuda") and kind == "none" and needed <= _free_everywhere():
        return Room(needed, spread=True)
    have = f"needs {in_units(needed)} of memory for its weights and {in_units(free)} are free"
    raise UserError(f"'{source.name}' {have}: {_remedy(counts, free, kind, where.device)}.")


def _free_everywhere() -> int:
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return sum(filter(None, map(free_bytes, [*devices, "cpu"])))


def _remedy(counts: Mapping[str, int], free: int, kind: str, device: str) -> str:
    """The first smaller form that fits."""
    kinds = (
        ("none",)
        if device == "mps" or kind != "none" or not set(counts) <= set(FORMATS)
        else ("none", "bnb-int8", "nf4")
    )
    for smaller in kinds:
        size = needed_bytes(counts, torch.bfloat16, smaller)
        if size <= free and smaller == "none":
            return f"take --dtype bfloat16, which needs {in_units(size)}, or a smaller model"
        if size <= free:
            return f"take --quantize {smaller} (--drafter-quantize for a drafter), which needs {in_units(size)}, or a smaller model"
    return "take a smaller model, or another --device"


def _files(folder: Path) -> Iterator[Path]:
    """The files that transformers would read."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        yield from (
            folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        )
    elif (folder / "model.safetensors").is_file():
        yield folder / "model.safetensors"


def _product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _group_rooms() -> Iterator[int]:
    """What the limits of a container leave, files that could be read again not counted."""
    for limit, usage, statistics in CONTROL_GROUPS:
        try:
            most, used = (int(Path(path).read_text()) for path in (limit, usage))
            told = dict(line.split() for line in Path(statistics).read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit
            continue
        files = sum(int(told.get(name, told.get(f"total_{name}", 0))) for name in ("inactive_file", "active_file"))
        yield max(0, most - used + files)
