"""Memory that was freed, back to the system."""

import ctypes
import gc
import sys
from contextlib import suppress

import torch


def give_back_memory() -> None:
    """Return what was freed to the system: on Linux it would otherwise stay with the process, on a GPU with torch."""
    gc.collect()  # models hold cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
