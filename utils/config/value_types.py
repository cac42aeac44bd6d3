"""Kinds of settings: how each sort of value is written, bounded, parsed and shown.

A kind turns typed text into a value or raises UserError with the allowed range and the nearest valid thing. It prints nothing and touches
no model; what the loaded models allow comes in as Limits.
"""

import re
from dataclasses import dataclass, fields
from typing import Any, Protocol

from utils.bounds import MAX_ORDER, MAX_TEMPERATURE, MAX_THREADS, MIN_ORDER
from utils.errors import UserError, one_of
from utils.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded target allows: its context in tokens and its vocabulary."""

    context: int = 1_000_000
    vocabulary: int = 1_000_000


class Kind(Protocol):
    """How one sort of value is written, parsed and shown."""

    @property
    def usage(self) -> str: ...

    @property
    def words(self) -> tuple[str, ...]:
        """Completions of the first argument."""

    def parse(self, text: str, current: Any, limits: Limits) -> Any: ...

    def show(self, value: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Toggle:
    """on, off, or nothing to flip."""

    usage: str = "[on|off]"
    words: tuple[str, ...] = ("on", "off")

    def parse(self, text: str, current: bool, limits: Limits) -> bool:
        states = {"": not current, "on": True, "off": False}
        if text.lower() not in states:
            raise UserError(f"'{text}' is neither on nor off; leave it out to switch.")
        return states[text.lower()]

    def show(self, value: bool) -> str:
        return "on" if value else "off"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    what: str

    @property
    def usage(self) -> str:
        return "|".join(self.words)

    def parse(self, text: str, current: str, limits: Limits) -> str:
        return one_of(text.lower(), self.words, self.what)

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Levels:
    """off, on and more than that, or nothing to flip between off and on."""

    words: tuple[str, ...]

    @property
    def usage(self) -> str:
        return f"[{'|'.join(self.words)}]"

    def parse(self, text: str, current: str, limits: Limits) -> str:
        if not text:
            return "on" if current == "off" else "off"
        return one_of(text.lower(), self.words, "level")

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `low` to `high`, or to the named limit of the loaded target."""

    low: int
    high: int | None = None
    limit: str = ""
    usage: str = "N"
    words: tuple[str, ...] = ()

    def parse(self, text: str, current: int, limits: Limits) -> int:
        high = getattr(limits, self.limit) if self.high is None else self.high
        value = whole_number(text, f"{self.low} to {high}")
        if not self.low <= value <= high:
            nearest = min(max(value, self.low), high)
            raise UserError(f"{text} is out of range: {self.low} to {high}; the nearest is {nearest}.")
        return value

    def show(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class ThreadCount:
    """A number of CPU threads, or auto, which is 0."""

    usage: str = "N|auto"
    words: tuple[str, ...] = ("auto",)

    def parse(self, text: str, current: int, limits: Limits) -> int:
        return 0 if text.lower() == "auto" else int(Whole(1, MAX_THREADS).parse(text, current, limits))

    def show(self, value: int) -> str:
        return str(value or "auto")


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """None is the template's own system prompt, an empty text an empty one."""

    usage: str = "TEXT|none|default"
    words: tuple[str, ...] = ("none", "default")

    def parse(self, text: str, current: str | None, limits: Limits) -> str | None:
        if not text:
            raise UserError(
                "Give the system prompt's text, 'none' for an empty one, or 'default' for the template's own."
            )
        return {"default": None, "none": ""}.get(text, text)

    def show(self, value: str | None) -> str:
        return {None: "default", "": "none"}.get(value, value or "none")


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """An n-gram storage to build: basic (all orders 2..n) or onelevel (order n alone)."""

    kind: str
    order: int

    def __str__(self) -> str:
        return f"{self.kind} {self.order}"


@dataclass(frozen=True, slots=True)
class StorageKind:
    """basic or onelevel, and the order."""

    usage: str = "basic|onelevel N"
    words: tuple[str, ...] = ("basic", "onelevel")

    def parse(self, text: str, current: StorageSpec, limits: Limits) -> StorageSpec:
        parts = text.split()
        if len(parts) != 2:
            raise UserError(
                f"A storage is 'basic N' or 'onelevel N' with an order N from {MIN_ORDER} to {MAX_ORDER}, for example: basic 3."
            )
        kind = one_of(parts[0].lower(), self.words, "storage")
        order: int = Whole(MIN_ORDER, MAX_ORDER).parse(parts[1], current.order, limits)
        return StorageSpec(kind, order)

    def show(self, value: StorageSpec) -> str:
        return str(value)


# Arguments of each processor: T a temperature, K a count of tokens, P a mass; brackets may be left out.
_PROCESSORS: dict[str, tuple[type[Any], str]] = {
    "greedy": (GreedyProcessor, "[T]"),
    "multinomial": (MultinomialProcessor, "T"),
    "topk": (TopKProcessor, "T K"),
    "nucleus": (NucleusProcessor, "T P"),
    "topknucleus": (TopKNucleusProcessor, "T K P"),
}
_EXAMPLES = {"T": "0.8", "K": "40", "P": "0.95"}


@dataclass(frozen=True, slots=True)
class ProcessorKind:
    """One of the five processors with its arguments."""

    usage: str = "NAME ARGS"
    words: tuple[str, ...] = tuple(_PROCESSORS)

    def parse(self, text: str, current: LogitsProcessor, limits: Limits) -> LogitsProcessor:
        name, *arguments = text.split() or [""]
        name = one_of(name.lower(), self.words, "processor")
        maker, pattern = _PROCESSORS[name]
        letters = pattern.strip("[]").split()
        if len(arguments) != len(letters) and not (pattern.startswith("[") and not arguments):
            example = " ".join(_EXAMPLES[letter] for letter in letters)
            raise UserError(
                f"{name} takes {pattern} ({_ranges(letters, limits)}), for example: /processor {name} {example}."
            )
        values = [_argument(letter, word, limits) for letter, word in zip(letters, arguments, strict=False)]
        return maker(*values)

    def show(self, value: Any) -> str:
        if value == GreedyProcessor():
            return "greedy"
        return " ".join([value.name, *(_shortest(getattr(value, part.name)) for part in fields(value))])


def _shortest(number: float) -> str:
    """A number as one would type it, without loss."""
    return f"{number:g}" if float(f"{number:g}") == number and "e" not in f"{number:g}" else repr(number)


def _ranges(letters: list[str], limits: Limits) -> str:
    ranges = {"T": f"T 0 to {MAX_TEMPERATURE:g}", "K": f"K 1 to {limits.vocabulary}", "P": "P above 0, at most 1"}
    return ", ".join(ranges[letter] for letter in letters)


def _argument(letter: str, word: str, limits: Limits) -> float | int:
    if letter == "K":
        count: int = Whole(1, limit="vocabulary").parse(word, 1, limits)
        return count
    low_open, high = (False, MAX_TEMPERATURE) if letter == "T" else (True, 1.0)
    name = {"T": "temperature", "P": "top-p"}[letter]
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", word, re.ASCII):
        raise UserError(f"'{word}' is not a number; {name} goes from {'above 0' if low_open else '0'} to {high:g}.")
    value = float(word)
    if value > high or value < 0 or (low_open and value == 0):
        raise UserError(f"{name} {word} is out of range: {'above 0' if low_open else '0'} to {high:g}.")
    return value


def whole_number(text: str, allowed: str) -> int:
    """The whole number written in `text`; UserError, naming what is allowed, for anything else."""
    if not re.fullmatch(r"[+-]?\d{1,30}", text, re.ASCII):
        problem = f"'{text}' is not a whole number" if text else "a whole number is missing"
        raise UserError(f"{problem}; allowed: {allowed}.")
    return int(text)
