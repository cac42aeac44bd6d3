"""Allowed values that several modules check: ranges of numbers, choices and device names.

Nothing heavy is imported, so that the command line can use them before torch is loaded.
"""

import os
import re
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from utils.errors import UserError


@dataclass(frozen=True, slots=True)
class WholeRange:
    """Whole numbers from `low` to `high`, both included; without `high` there is no upper bound."""

    low: int
    high: int | None = None

    def __str__(self) -> str:
        return f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"

    def check(self, value: SupportsIndex, name: str = "") -> int:
        """The value as an int. Raises UserError if it is not a whole number or out of range; `name` says what it is."""
        shown = f"{name} {value}".strip()
        try:
            number = index(value)  # accepts NumPy integers, refuses floats
        except TypeError as error:
            raise UserError(f"{shown} is out of range: a whole number, {self}.") from error
        nearest = max(number, self.low) if self.high is None else min(max(number, self.low), self.high)
        if number != nearest:
            raise UserError(f"{shown} is out of range: {self}; the nearest is {nearest}.")
        return number

    def parse(self, text: str) -> int:
        """The number written in `text`. Raises UserError as `check` does."""
        # int() would also accept underscores and blanks.
        if not re.fullmatch(r"[+-]?\d{1,30}", text, re.ASCII):
            problem = f"'{text}' is not a whole number" if text else "a whole number is missing"
            raise UserError(f"{problem}; allowed: {self}.")
        return self.check(int(text))


@dataclass(frozen=True, slots=True)
class RealRange:
    """Real numbers from `low`, included or not, to `high`. Messages call the number `name`."""

    name: str
    low: float
    high: float
    excludes_low: bool = False

    def __str__(self) -> str:
        return f"above {self.low:g}, at most {self.high:g}" if self.excludes_low else f"{self.low:g} to {self.high:g}"

    def check(self, value: float) -> float:
        """The value itself. Raises UserError if it is out of range or NaN."""
        # Written as `not ... <=`, so that NaN fails as well.
        if not self.low <= value <= self.high or (self.excludes_low and value == self.low):
            # Not rounded: 1.0000001 must not be shown as 1, which is allowed.
            raise UserError(f"{self.name} {value!r} is out of range: {self}.")
        return value

    def parse(self, text: str) -> float:
        """The number written in `text`. Raises UserError as `check` does."""
        # float() would also accept "nan", "inf" and underscores.
        if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII):
            raise UserError(f"'{text}' is not a number; allowed for {self.name}: {self}.")
        return self.check(float(text))


K = 1024


def parse_tokens(text: str) -> int:
    """A number of tokens, such as 512 or 8k, which is 8,192. Raises UserError for anything else."""
    number = WholeRange(1, 10**6).parse(text.lower().removesuffix("k"))
    return number * K if text.lower().endswith("k") else number


def short_tokens(count: int) -> str:
    """The inverse of `parse_tokens`."""
    return f"{count // K}k" if count % K == 0 else str(count)


MAX_SEED = 2**32 - 1
MAX_GAMMA = 63
AUTO_GAMMA = 16  # maximum number of drafts per round where gamma is chosen automatically
SEED = WholeRange(0, MAX_SEED)
TEMPERATURE = RealRange("temperature", 0, 100)
TOP_P = RealRange("top-p", 0, 1, excludes_low=True)
TOLERANCE = RealRange("the tolerance in percent", 0.1, 50)
MOST_REPEATS = 100
GATE_REPEATS = WholeRange(1, MOST_REPEATS)
NGRAM_ORDER = WholeRange(2, 16)
MAX_NGRAMS = 100_000_000
NGRAM_LIMIT = WholeRange(1, MAX_NGRAMS)
FILLER_TOP_K = WholeRange(1, 64)
# More threads than cores make every layer slower. A process may be restricted to some of the cores.
THREADS = WholeRange(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

ENGINES = ("auto", "plain", "invariant", "cuda_graph")
ENGINE_WEIGHTS = ("float32", "bfloat16", "int8", "int4", "gguf")

RULES = ("rejection", "coupled", "block")  # of verification

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4", "bnb-int8", "nf4")


def check_device(name: str) -> str:
    """`name` itself, if it is auto or names a device, which the machine may lack. Raises UserError otherwise."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name, re.ASCII):
        raise UserError(f"'{name}' is not a device; choose auto, cpu, cuda, cuda:N or mps.")
    return name
