"""Value types of settings: how each type of value is written, checked, parsed and shown.

A value type parses typed text or raises UserError with the allowed values. It prints and loads nothing, not even torch.
Limits of the loaded target are passed as Limits.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from utils.bounds import NGRAM_ORDER, TEMPERATURE, TOP_P, RealRange, WholeRange
from utils.errors import UserError, check_choice
from utils.metrics.costs import Costs
from utils.pairs.request import DRAFTERS, check_drafter


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded target allows: its context length in tokens and its vocabulary size."""

    context: int = 1_000_000
    vocabulary: int = 1_000_000


class ValueType(Protocol):
    """How one type of value is written, parsed and shown.

    Values are Any, because the settings table mixes value types.
    """

    @property
    def usage(self) -> str:
        """The argument in /help."""

    @property
    def words(self) -> tuple[str, ...]:
        """Completions of the argument."""

    def parse(self, text: str, current: Any, limits: Limits) -> Any:
        """The parsed value of `text`. Raises UserError if it is not valid. `current` is the value to toggle from."""

    def show(self, value: Any) -> str:
        """The value as it would be typed."""


# Words that are accepted for on and off.
SWITCH_WORDS = dict.fromkeys(("yes", "true", "1"), "on") | dict.fromkeys(("no", "false", "0"), "off")


@dataclass(frozen=True, slots=True)
class WordChoice:
    """One of a few words, with the value of each. `what` is the noun in messages.

    With the words on and off it is a switch. An empty text turns it off, or on if it was off.
    """

    values: Mapping[str, Any]
    what: str

    @classmethod
    def of(cls, words: Sequence[str], what: str) -> "WordChoice":
        """Words whose values are themselves."""
        return cls({word: word for word in words}, what)

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.values)

    @property
    def is_switch(self) -> bool:
        """Whether an empty text toggles it."""
        return "on" in self.values

    @property
    def usage(self) -> str:
        words = "|".join(self.values)
        return f"[{words}]" if self.is_switch else words

    def parse(self, text: str, current: Any, limits: Limits) -> Any:
        word = text.lower()
        if self.is_switch:
            word = SWITCH_WORDS.get(word, word) or ("on" if self.show(current) == "off" else "off")
        return self.values[check_choice(word, self.words, self.what)]

    def show(self, value: Any) -> str:
        return next(word for word, known in self.values.items() if known == value)


ON_OFF = WordChoice({"on": True, "off": False}, "value")


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a range, or up to the field of Limits that `limit` names."""

    allowed: WholeRange | RealRange
    limit: str = ""
    usage: str = "N"
    words: tuple[str, ...] = ()

    def parse(self, text: str, current: float, limits: Limits) -> float:
        allowed = self.allowed
        if self.limit and isinstance(allowed, WholeRange):
            allowed = WholeRange(allowed.low, getattr(limits, self.limit))
        return allowed.parse(text)

    def show(self, value: float) -> str:
        return shortest(value)


@dataclass(frozen=True, slots=True)
class NumberOr:
    """A number, or a word that stands for `value`. `same` is a number with the same meaning."""

    number: Number
    word: str
    value: int | None = None
    same: float | None = None

    @property
    def usage(self) -> str:
        return f"{self.number.usage}|{self.word}"

    @property
    def words(self) -> tuple[str, ...]:
        return (self.word,)

    def parse(self, text: str, current: float | None, limits: Limits) -> float | None:
        if text.lower() == self.word:
            return self.value
        try:
            number = self.number.parse(text, 0, limits)
        except UserError as error:
            raise UserError(f"{str(error).removesuffix('.')}, or {self.word}.") from error
        return self.value if number == self.same else number

    def show(self, value: float | None) -> str:
        return self.word if value == self.value or value is None else self.number.show(value)


def shortest(number: float) -> str:
    """The shortest text that parses to the same number."""
    # An exponent is avoided because WholeRange does not accept one.
    return f"{number:g}" if float(f"{number:g}") == number and "e" not in f"{number:g}" else repr(number)


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A system prompt. None is the default of the chat template; an empty text is an empty system prompt."""

    usage: str = "TEXT"
    words: tuple[str, ...] = ("none", "default")

    def parse(self, text: str, current: str | None, limits: Limits) -> str | None:
        if not text:
            raise UserError(
                "Give a system prompt, 'none' for an empty one, or 'default' for that of the chat template."
            )
        # Case-sensitive and exact, so that a system prompt may begin with one of these words.
        return {"default": None, "none": ""}.get(text, text)

    def show(self, value: str | None) -> str:
        return {None: "default", "": "none"}.get(value, value or "none")


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """A kind of n-gram storage: basic (all orders 2..n) or onelevel (only order n)."""

    kind: str
    order: int

    def __str__(self) -> str:
        return f"{self.kind} {self.order}"


@dataclass(frozen=True, slots=True)
class StorageType:
    """A kind of n-gram storage and its order."""

    usage: str = "basic|onelevel N"
    words: tuple[str, ...] = ("basic", "onelevel")

    def parse(self, text: str, current: StorageSpec, limits: Limits) -> StorageSpec:
        parts = text.split()
        if len(parts) != 2:
            raise UserError(f"Give 'basic N' or 'onelevel N' with an order N from {NGRAM_ORDER}, for example: basic 3.")
        return StorageSpec(check_choice(parts[0].lower(), self.words, "storage"), NGRAM_ORDER.parse(parts[1]))

    def show(self, value: StorageSpec) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class StorageKind(StorageType):
    """The kind of n-gram storage alone, or with a new order."""

    usage: str = "basic|onelevel"

    def parse(self, text: str, current: StorageSpec, limits: Limits) -> StorageSpec:
        kind, _, order = text.lower().partition(" ")
        kind = check_choice(kind, self.words, "storage")
        return StorageSpec(kind, NGRAM_ORDER.parse(order.strip()) if order else current.order)

    def show(self, value: StorageSpec) -> str:
        return value.kind


@dataclass(frozen=True, slots=True)
class DrafterKinds:
    """One or more drafter kinds. Repeated ones count once."""

    usage: str = "KIND ..."
    words: tuple[str, ...] = DRAFTERS

    def parse(self, text: str, current: tuple[str, ...], limits: Limits) -> tuple[str, ...]:
        kinds = tuple(dict.fromkeys(text.lower().split()))
        if not kinds:
            raise UserError(f"Give one or more of {', '.join(self.words)}.")
        for kind in kinds:
            check_drafter(kind)
        return kinds

    def show(self, value: tuple[str, ...]) -> str:
        return " ".join(value)


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """The arguments of a logits processor, or None for those that it lacks. A greedy one ignores its temperature.

    `utils.comparison.job` makes the processor itself, so that settings need no torch.
    """

    temperature: float = 1
    top_k: int | None = None
    top_p: float | None = None
    is_greedy: bool = False

    @property
    def name(self) -> str:
        """The name of the processor in /processor."""
        if self.is_greedy:
            return "greedy"
        if self.top_k is not None:
            return "topk" if self.top_p is None else "topknucleus"
        return "multinomial" if self.top_p is None else "nucleus"

    @property
    def arguments(self) -> list[float]:
        """Its arguments in their order."""
        return [value for value in (self.temperature, self.top_k, self.top_p) if value is not None]

    @property
    def effective_temperature(self) -> float:
        """The temperature, which is 0 for a greedy processor."""
        return 0 if self.is_greedy else self.temperature

    def with_temperature(self, temperature: float) -> "ProcessorSpec":
        """With a new temperature. A temperature of 0 is greedy, which has neither top-k nor top-p."""
        return self._changed(temperature, self.top_k, self.top_p)

    def with_top_k(self, top_k: int | None) -> "ProcessorSpec":
        """With a new top-k. A temperature of 0 becomes 1."""
        return self._changed(self._temperature_for(top_k), top_k, self.top_p)

    def with_top_p(self, top_p: float | None) -> "ProcessorSpec":
        """With a new top-p. A temperature of 0 becomes 1."""
        return self._changed(self._temperature_for(top_p), self.top_k, top_p)

    def _temperature_for(self, limit: float | None) -> float:
        return 1 if self.effective_temperature == 0 and limit is not None else self.effective_temperature

    def _changed(self, temperature: float, top_k: int | None, top_p: float | None) -> "ProcessorSpec":
        # An unchanged processor stays as typed: greedy may have a temperature.
        if (temperature, top_k, top_p) == (self.effective_temperature, self.top_k, self.top_p):
            return self
        return GREEDY if temperature == 0 else ProcessorSpec(temperature, top_k, top_p)


GREEDY = ProcessorSpec(is_greedy=True)

# Arguments of each processor: T is a temperature, K a number of tokens, P a probability mass; [T] is optional.
PROCESSORS = {"greedy": "[T]", "multinomial": "T", "topk": "T K", "nucleus": "T P", "topknucleus": "T K P"}
PROCESSOR_EXAMPLES = {"T": "0.8", "K": "40", "P": "0.95"}


@dataclass(frozen=True, slots=True)
class ProcessorType:
    """One of the five processors with its arguments, such as "nucleus 0.8 0.95"."""

    usage: str = "NAME ARGS"
    words: tuple[str, ...] = tuple(PROCESSORS)

    def parse(self, text: str, current: ProcessorSpec, limits: Limits) -> ProcessorSpec:
        name, *arguments = text.split() or [""]
        name = check_choice(name.lower(), self.words, "processor")
        pattern = PROCESSORS[name]
        ranges: dict[str, WholeRange | RealRange] = {
            "T": TEMPERATURE,
            "K": WholeRange(1, limits.vocabulary),
            "P": TOP_P,
        }
        letters = pattern.strip("[]").split()
        if len(arguments) != len(letters) and not (pattern.startswith("[") and not arguments):
            example = " ".join(PROCESSOR_EXAMPLES[letter] for letter in letters)
            allowed = ", ".join(f"{letter} {ranges[letter]}" for letter in letters)
            raise UserError(f"{name} takes {pattern} ({allowed}), for example: /processor {name} {example}.")
        values: dict[str, Any] = {
            letter: ranges[letter].parse(word) for letter, word in zip(letters, arguments, strict=False)
        }
        return ProcessorSpec(values.get("T", 1), values.get("K"), values.get("P"), is_greedy=name == "greedy")

    def show(self, value: ProcessorSpec) -> str:
        # A greedy processor has a temperature that was not typed, unless it differs from the default.
        return value.name if value == GREEDY else " ".join([value.name, *map(shortest, value.arguments)])


COST_TABLE_EXAMPLE = "verify 0.1 0.15 0.2; head 0.07"


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of verifying and drafting on one line. With the word `measure` it is None: they are measured before a
    run.
    """

    usage: str = "measure|TABLE"
    words: tuple[str, ...] = ("measure",)

    def parse(self, text: str, current: Costs | None, limits: Limits) -> Costs | None:
        if text.lower() == "measure":
            return None
        try:
            return _table(text)
        except ValueError as error:
            raise UserError(f"Write 'measure', or a table such as: {COST_TABLE_EXAMPLE}.") from error

    def show(self, value: Costs | None) -> str:
        return "measure" if value is None else "; ".join(_parts(value))


def _table(text: str) -> Costs:
    """A table in the form of `_parts`. Raises ValueError for anything else."""
    parts = [part.split() for part in text.split(";")]
    starts = [index for index, part in enumerate(parts) if part[:1] == ["at"]]
    # A table for one context length need not name it.
    if starts in ([], [0]):
        return _one_table(parts)
    first, second = starts
    if first != 0:
        raise ValueError(text)
    longer = _one_table(parts[second:])
    shorter = _one_table(parts[:second])
    if not 0 < shorter.length < longer.length:
        raise ValueError(text)
    return replace(shorter, longer=longer)


def _one_table(parts: Sequence[list[str]]) -> Costs:
    """The table of one context length. A missing word also raises ValueError, by unpacking."""
    if parts[0][:1] != ["at"]:
        parts = [["at", "0"], *parts]
    (_, length, *step), (name, *verify), *others = parts
    reading = [part[1:] for part in others if part[:1] == ["read"]]
    drafting = [part for part in others if part[:1] != ["read"]]
    if name != "verify" or any(len(cost) != 2 for cost in (*drafting, *reading)) or len(step) > 1:
        raise ValueError(name)
    draft, read = ({kind: _cost(word) for kind, word in costs} for costs in (drafting, reading))
    ratio = _cost(step[0]) if step else 1.0
    return Costs.of([_cost(word) for word in verify], draft, read, length=_length(length), step=ratio)


def _parts(costs: Costs) -> list[str]:
    """The parts of a table in typed form."""
    step = [] if costs.step == 1 else [f"{costs.step:g}"]
    parts = [" ".join(["at", str(costs.length), *step])] if costs.length else []
    parts.append(" ".join(["verify", *(f"{cost:g}" for cost in costs.verify)]))
    parts += [f"{kind} {cost:g}" for kind, cost in costs.draft]
    parts += [f"read {kind} {cost:g}" for kind, cost in costs.read]
    return parts if costs.longer is None else [*parts, *_parts(costs.longer)]


def _length(word: str) -> int:
    if not re.fullmatch(r"\d{1,9}", word, re.ASCII):
        raise ValueError(word)
    return int(word)


def _cost(word: str) -> float:
    # float() would also accept "nan", "inf", signs and exponents.
    if not re.fullmatch(r"\d{1,4}(\.\d{1,9})?", word, re.ASCII):
        raise ValueError(word)
    return float(word)
