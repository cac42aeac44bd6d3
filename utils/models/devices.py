"""Where models go and in which number format, from the words of the command line to what torch takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from utils.bounds import DEVICE_PATTERN, DTYPES
from utils.distributed import own_device
from utils.errors import UserError
from utils.models.embedded import Report


@dataclass(frozen=True, slots=True)
class Placement:
    """Where models go, in which number format, and who hears of it.

    parted: over all processes, each taking a part of every layer. layered: over all GPUs and the CPU, layer by layer, should one not do.
    """

    device: str
    dtype: torch.dtype | str
    report: Report
    parted: bool = False
    layered: bool = False


def choose_device(word: str) -> str:
    """`auto` is CUDA, else MPS, else the CPU. Raises UserError for a device that is not there."""
    if word == "auto":
        return own_device() if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    # torch would raise on these only at the first transfer, after minutes of loading.
    if not re.fullmatch(DEVICE_PATTERN, word):
        raise UserError(f"'{word}' is no device: it must be auto, cpu, cuda, cuda:N or mps.")
    if word == "mps" and not torch.backends.mps.is_available():
        raise UserError("This machine has no mps device: leave the device out, or take cpu.")
    if word.startswith("cuda"):
        _check_cuda(word)
    return word


def choose_dtype(word: str, device: str) -> torch.dtype | str:
    """`auto` is float32 on the CPU and the checkpoint's own format elsewhere.

    Raises UserError for an unknown format.
    """
    # 16-bit products on a CPU without such instructions are emulated, and verify windows get no cheaper.
    if word == "auto":
        return torch.float32 if device == "cpu" else "auto"
    if word not in DTYPES:
        raise UserError(f"'{word}' is no dtype: it must be auto, {', '.join(DTYPES)}.")
    dtype: torch.dtype = getattr(torch, word)
    return dtype


def _check_cuda(word: str) -> None:
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("This machine has no usable CUDA device: leave the device out, or take cpu.")
    if int(word.partition(":")[2] or 0) >= count:
        raise UserError(f"{word} does not exist: this machine has cuda:0 to cuda:{count - 1}.")
