"""Value type of the logits processor: a name and its arguments, such as "nucleus 0.8 0.95"."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from utils.bounds import TEMPERATURE, TOP_P, WholeRange
from utils.config.value_types import Limits
from utils.errors import UserError, check_choice
from utils.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)

# Arguments of each processor: T is a temperature, K a number of tokens, P a probability mass; [T] is optional.
_PROCESSORS: dict[str, tuple[Callable[..., LogitsProcessor], str]] = {
    "greedy": (GreedyProcessor, "[T]"),
    "multinomial": (MultinomialProcessor, "T"),
    "topk": (TopKProcessor, "T K"),
    "nucleus": (NucleusProcessor, "T P"),
    "topknucleus": (TopKNucleusProcessor, "T K P"),
}
_EXAMPLES = {"T": "0.8", "K": "40", "P": "0.95"}


@dataclass(frozen=True, slots=True)
class ProcessorType:
    """One of the five processors with its arguments."""

    usage: str = "NAME ARGS"
    words: tuple[str, ...] = tuple(_PROCESSORS)

    def parse(self, text: str, current: LogitsProcessor, limits: Limits) -> LogitsProcessor:
        name, *arguments = text.split() or [""]
        name = check_choice(name.lower(), self.words, "processor")
        make, pattern = _PROCESSORS[name]
        letters = pattern.strip("[]").split()
        if len(arguments) != len(letters) and not (pattern.startswith("[") and not arguments):
            example = " ".join(_EXAMPLES[letter] for letter in letters)
            raise UserError(
                f"{name} takes {pattern} ({_ranges(letters, limits)}), for example: /processor {name} {example}."
            )
        return make(*(_argument(letter, word, limits) for letter, word in zip(letters, arguments, strict=False)))

    def show(self, value: Any) -> str:
        # A greedy processor has a temperature that was not typed, unless it differs from the default.
        if value == GreedyProcessor():
            return "greedy"
        return " ".join([value.name, *(_shortest(getattr(value, part.name)) for part in fields(value))])


def _shortest(number: float) -> str:
    """The shortest text that reads back as the same number."""
    # An exponent is avoided because WholeRange, which parses K, does not accept one.
    return f"{number:g}" if float(f"{number:g}") == number and "e" not in f"{number:g}" else repr(number)


def _ranges(letters: list[str], limits: Limits) -> str:
    ranges = {"T": TEMPERATURE, "K": WholeRange(1, limits.vocabulary), "P": TOP_P}
    return ", ".join(f"{letter} {ranges[letter]}" for letter in letters)


def _argument(letter: str, word: str, limits: Limits) -> float | int:
    if letter == "K":
        return WholeRange(1, limits.vocabulary).parse(word)
    return (TEMPERATURE if letter == "T" else TOP_P).parse(word)
