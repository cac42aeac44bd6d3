"""Returning freed memory to the operating system."""

import ctypes
import gc
import sys
from contextlib import suppress

import torch


def release_memory() -> None:
    """Collect garbage and return freed memory, which glibc and torch would otherwise keep for the process."""
    gc.collect()  # models contain reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_allocator()


def trim_allocator() -> None:
    """Return memory that glibc keeps after it was freed."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library other than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
