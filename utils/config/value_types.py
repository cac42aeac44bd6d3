"""Value types of settings: how each type of value is written, checked, parsed and shown.

A value type parses typed text or raises UserError with the allowed values. It prints and loads nothing, not even torch.
Limits of the loaded target are passed as Limits.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from utils.bounds import NGRAM_ORDER, TEMPERATURE, TOP_P, RealRange, WholeRange
from utils.errors import UserError, check_choice
from utils.metrics.costs import Costs
from utils.pairs.request import DRAFTERS, check_drafter
from utils.prompts.request_fields import parse_request


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded target allows: its context length in tokens and its vocabulary size."""

    context: int = 1_000_000
    vocabulary: int = 1_000_000


@dataclass(frozen=True, slots=True)
class ValueType:
    """How one type of value is written, parsed and shown.

    `words` are its completions. `parse` takes a text, the value to toggle from and the limits; it raises UserError for
    a text that is not valid. `show` returns the value as it would be typed.
    """

    usage: str
    words: tuple[str, ...]
    parse: Callable[[str, Any, Limits], Any]
    show: Callable[[Any], str] = str

    @property
    def is_switch(self) -> bool:
        """Whether an empty text toggles it."""
        return "on" in self.words


# Words that are accepted for on and off.
SWITCH_WORDS = dict.fromkeys(("yes", "true", "1"), "on") | dict.fromkeys(("no", "false", "0"), "off")


def choice(values: Mapping[str, Any] | Sequence[str], what: str) -> ValueType:
    """One of a few words, which stand for themselves or have values. `what` is the noun in messages.

    With the words on and off it is a switch. An empty text turns it off, or on if it was off.
    """
    known = dict(values) if isinstance(values, Mapping) else {word: word for word in values}
    usage, is_switch = "|".join(known), "on" in known

    def show(value: Any) -> str:
        return next(word for word, each in known.items() if each == value)

    def parse(text: str, current: Any, limits: Limits) -> Any:
        word = text.lower()
        if is_switch:
            word = SWITCH_WORDS.get(word, word) or ("on" if show(current) == "off" else "off")
        return known[check_choice(word, tuple(known), what)]

    return ValueType(f"[{usage}]" if is_switch else usage, tuple(known), parse, show)


ON_OFF = choice({"on": True, "off": False}, "value")


def number(allowed: WholeRange | RealRange, limit: str = "", usage: str = "N") -> ValueType:
    """A number in a range, or up to the field of Limits that `limit` names."""

    def parse(text: str, current: Any, limits: Limits) -> float:
        return (WholeRange(int(allowed.low), getattr(limits, limit)) if limit else allowed).parse(text)

    return ValueType(usage, (), parse, shortest)


def number_or(known: ValueType, word: str, value: int | None = None, same: float | None = None) -> ValueType:
    """A number, or a word that stands for `value`. `same` is a number with the same meaning."""

    def parse(text: str, current: Any, limits: Limits) -> float | None:
        if text.lower() in (word, str(value)):  # a record has the value
            return value
        try:
            parsed: float = known.parse(text, 0, limits)
        except UserError as error:
            raise UserError(f"{str(error).removesuffix('.')}, or {word}.") from error
        return value if parsed == same else parsed

    def show(current: float | None) -> str:
        return word if current == value or current is None else known.show(current)

    return ValueType(f"{known.usage}|{word}", (word,), parse, show)


def shortest(number: float) -> str:
    """The shortest text that parses to the same number."""
    return repr(number).removesuffix(".0")


def _system_prompt(text: str, current: str | None, limits: Limits) -> str | None:
    if not text:
        raise UserError("Give a system prompt, 'none' for an empty one, or 'default' for that of the chat template.")
    # Case-sensitive and exact, so that a system prompt may begin with one of these words.
    return {"default": None, "none": ""}.get(text, text)


# None is the default of the chat template; an empty text is an empty system prompt.
SYSTEM_PROMPT = ValueType(
    "TEXT", ("none", "default"), _system_prompt, lambda value: "default" if value is None else value or "none"
)


# Fields of a request as JSON; an empty text stands for none.
REQUEST = ValueType(
    "JSON|none",
    ("none",),
    lambda text, current, limits: "" if text == "none" else parse_request(text),
    lambda value: value or "none",
)


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """A kind of n-gram storage: basic (all orders 2..n) or onelevel (only order n)."""

    kind: str
    order: int

    def __str__(self) -> str:
        return f"{self.kind} {self.order}"


STORAGES = ("basic", "onelevel")


def _storage(text: str, current: StorageSpec, limits: Limits) -> StorageSpec:
    """A kind of storage, alone or with a new order."""
    kind, _, order = text.lower().partition(" ")
    kind = check_choice(kind, STORAGES, "storage")
    return StorageSpec(kind, NGRAM_ORDER.parse(order.strip()) if order else current.order)


STORAGE = ValueType("basic|onelevel", STORAGES, _storage)


def _drafter_kinds(text: str, current: tuple[str, ...], limits: Limits) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(text.lower().split()))  # repeated ones count once
    if not kinds:
        raise UserError(f"Give one or more of {', '.join(DRAFTERS)}.")
    for kind in kinds:
        check_drafter(kind)
    return kinds


DRAFTER_KINDS = ValueType("KIND ...", DRAFTERS, _drafter_kinds, " ".join)


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """The arguments of a logits processor, or None for those that it lacks. A greedy one ignores its temperature.

    `utils.comparison.strategies` makes the processor itself, so that settings need no torch.
    """

    temperature: float = 1
    top_k: int | None = None
    top_p: float | None = None
    is_greedy: bool = False

    @property
    def name(self) -> str:
        if self.is_greedy:
            return "greedy"
        if self.top_k is not None:
            return "topk" if self.top_p is None else "topknucleus"
        return "multinomial" if self.top_p is None else "nucleus"

    @property
    def arguments(self) -> list[float]:
        return [value for value in (self.temperature, self.top_k, self.top_p) if value is not None]

    @property
    def effective_temperature(self) -> float:
        """The temperature, which is 0 for a greedy processor."""
        return 0 if self.is_greedy else self.temperature

    def changed(self, **parts: float | None) -> "ProcessorSpec":
        """With another temperature, top-k or top-p.

        A temperature of 0 is greedy, which has neither top-k nor top-p. With one of these it becomes 1.
        """
        before = {"temperature": self.effective_temperature, "top_k": self.top_k, "top_p": self.top_p}
        after: dict[str, Any] = before | parts
        # An unchanged processor stays as typed: greedy may have a temperature.
        if after == before:
            return self
        if "temperature" not in parts and not after["temperature"]:
            after["temperature"] = 1
        return ProcessorSpec(**after) if after["temperature"] else GREEDY


GREEDY = ProcessorSpec(is_greedy=True)

# Arguments of each processor: T is a temperature, K a number of tokens, P a probability mass; [T] is optional.
PROCESSORS = {"greedy": "[T]", "multinomial": "T", "topk": "T K", "nucleus": "T P", "topknucleus": "T K P"}
PROCESSOR_EXAMPLES = {"T": "0.8", "K": "40", "P": "0.95"}


def _processor(text: str, current: ProcessorSpec, limits: Limits) -> ProcessorSpec:
    name, *arguments = text.split() or [""]
    name = check_choice(name.lower(), tuple(PROCESSORS), "processor")
    ranges: dict[str, WholeRange | RealRange] = {"T": TEMPERATURE, "K": WholeRange(1, limits.vocabulary), "P": TOP_P}
    pattern = PROCESSORS[name]
    letters = pattern.strip("[]").split()
    if len(arguments) != len(letters) and not (pattern.startswith("[") and not arguments):
        example = " ".join(PROCESSOR_EXAMPLES[letter] for letter in letters)
        allowed = ", ".join(f"{letter} {ranges[letter]}" for letter in letters)
        raise UserError(f"{name} takes {pattern} ({allowed}), for example: /processor {name} {example}.")
    values: dict[str, Any] = {
        letter: ranges[letter].parse(word) for letter, word in zip(letters, arguments, strict=False)
    }
    return ProcessorSpec(values.get("T", 1), values.get("K"), values.get("P"), is_greedy=name == "greedy")


def _shown_processor(value: ProcessorSpec) -> str:
    # A greedy processor has a temperature that was not typed, unless it differs from the default.
    return value.name if value == GREEDY else " ".join([value.name, *map(shortest, value.arguments)])


# One of the five processors with its arguments, such as "nucleus 0.8 0.95".
PROCESSOR = ValueType("NAME ARGS", tuple(PROCESSORS), _processor, _shown_processor)

COST_TABLE_EXAMPLE = "verify 0.1 0.15 0.2; head 0.07"
COST = r"\d{1,4}(?:\.\d{1,9})?"  # float() would also accept "nan", "inf", signs and exponents
# The table of one context length, which a single table need not name.
ONE_TABLE = rf"(?:at (\d{{1,9}})(?: ({COST}))?; )?verify((?: {COST})*)((?:; (?:read )?(?!read )[^; ]+ {COST})*)"


def _costs(text: str, current: Costs | None, limits: Limits) -> Costs | None:
    if text.lower() == "measure":
        return None
    normal = re.sub(" ?; ?", "; ", " ".join(text.split()))
    tables = [re.fullmatch(ONE_TABLE, part, re.ASCII) for part in re.split("; (?=at )", normal)]
    costs = [_one_table(*match.groups("")) for match in tables if match]
    is_valid = len(costs) == len(tables) and (
        len(costs) == 1 or (len(costs) == 2 and 0 < costs[0].length < costs[1].length)
    )
    if not is_valid:
        raise UserError(f"Write 'measure', or a table such as: {COST_TABLE_EXAMPLE}.")
    return replace(costs[0], longer=costs[1] if costs[1:] else None)


def _one_table(length: str, step: str, verify: str, others: str) -> Costs:
    """The costs of the groups of ONE_TABLE."""
    draft, read = dict[str, float](), dict[str, float]()
    for *reads, kind, cost in (part.split() for part in others.split(";")[1:]):
        (read if reads else draft)[kind] = float(cost)
    return Costs.of(list(map(float, verify.split())), draft, read, length=int(length or 0), step=float(step or 1))


def _parts(costs: Costs) -> list[str]:
    """The parts of a table in typed form."""
    step = [] if costs.step == 1 else [f"{costs.step:g}"]
    parts = [" ".join(["at", str(costs.length), *step])] if costs.length else []
    parts.append(" ".join(["verify", *(f"{cost:g}" for cost in costs.verify)]))
    parts += [f"{kind} {cost:g}" for kind, cost in costs.draft]
    parts += [f"read {kind} {cost:g}" for kind, cost in costs.read]
    return parts if costs.longer is None else [*parts, *_parts(costs.longer)]


# The costs of verifying and drafting on one line. With the word `measure` it is None: they are measured before a run.
COST_TABLE = ValueType(
    "measure|TABLE", ("measure",), _costs, lambda value: "measure" if value is None else "; ".join(_parts(value))
)
