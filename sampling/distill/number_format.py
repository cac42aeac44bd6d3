"""The number format of a distillation. On a CPU the faster one is measured: bfloat16 is slow without matrix tiles."""

from __future__ import annotations

import time

import torch

FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
AUTO = "auto"
ROWS, SIZE = 256, 768  # of the product that is timed
REPEATS = 7
CLEARLY_FASTER = 0.9  # times the seconds of float32, which is more accurate


def training_dtype(device: str) -> torch.dtype:
    """bfloat16 where the hardware has instructions for it and, on a CPU, multiplies faster than in float32."""
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device != "cpu" or not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.float32
    return torch.bfloat16 if _short_is_faster() else torch.float32


def _short_is_faster() -> bool:
    """Whether products in bfloat16 take clearly less time, the formats in turns."""
    inputs = {
        dtype: (torch.ones(ROWS, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)) for dtype in FORMATS.values()
    }
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in inputs}
    for _ in range(1 + REPEATS):
        for dtype, (left, right) in inputs.items():
            began = time.perf_counter()
            _ = left @ right.T
            seconds[dtype].append(time.perf_counter() - began)
    # Not the first products, which set kernels up, and not what other programs slow down.
    return min(seconds[torch.bfloat16][1:]) < CLEARLY_FASTER * min(seconds[torch.float32][1:])
