"""Devices and number formats: from the words of the command line to the values that torch takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from utils.bounds import check_device
from utils.errors import UserError
from utils.models import Reporter


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
        _check_cuda(name)
    return name


def choose_dtype(name: str, device: str) -> torch.dtype | str:
    """Return a torch dtype. `auto` is float32 on the CPU and "auto", the checkpoint's own format, elsewhere."""
    # 16-bit products are emulated on CPUs without such instructions, and a verify pass does not get cheaper.
    if name == "auto":
        return torch.float32 if device == "cpu" else "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _check_cuda(name: str) -> None:
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("This machine has no usable CUDA device: omit the device, or use cpu.")
    if int(name.partition(":")[2] or 0) >= count:
        raise UserError(f"{name} does not exist: this machine has cuda:0 to cuda:{count - 1}.")
