"""Kinds of settings about drafting: how many drafts, by which drafters, at what cost. See utils.config.value_types."""

import re
from dataclasses import dataclass

from utils.bounds import DRAFTER_KINDS, MAX_GAMMA
from utils.config.value_types import Limits, Whole
from utils.errors import UserError, one_of
from utils.metrics.costs import Costs


@dataclass(frozen=True, slots=True)
class DraftCount:
    """A number of drafts, or auto, which is None."""

    usage: str = "N|auto"
    words: tuple[str, ...] = ("auto",)

    def parse(self, text: str, current: int | None, limits: Limits) -> int | None:
        return None if text.lower() == "auto" else int(Whole(0, MAX_GAMMA).parse(text, current or 0, limits))

    def show(self, value: int | None) -> str:
        return "auto" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class DrafterWords:
    """One or more kinds of drafters, each once."""

    usage: str = "KIND ..."
    words: tuple[str, ...] = DRAFTER_KINDS

    def parse(self, text: str, current: tuple[str, ...], limits: Limits) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.lower().split()))
        if not found:
            raise UserError(f"Give one or more of {', '.join(self.words)}.")
        for word in found:
            if not word.startswith("layers:"):
                one_of(word, self.words, "drafter")
            elif not re.fullmatch(r"layers:[1-9]\d{0,3}", word, re.ASCII):
                raise UserError(f"'{word}' is no drafter: write layers:K with a whole number, for example layers:4.")
        return found

    def show(self, value: tuple[str, ...]) -> str:
        return " ".join(value)


@dataclass(frozen=True, slots=True)
class CostTable:
    """What drafting takes, as one line; None is yet to be measured."""

    usage: str = "measure|TABLE"
    words: tuple[str, ...] = ("measure",)

    def parse(self, text: str, current: Costs | None, limits: Limits) -> Costs | None:
        if text.lower() == "measure":
            return None
        parts = [part.split() for part in text.split(";")]
        try:
            (name, *windows), *steps = parts
            if name != "windows" or any(len(step) != 2 for step in steps):
                raise ValueError
            return Costs.of([_cost(word) for word in windows], {kind: _cost(word) for kind, word in steps})
        except ValueError as error:
            raise UserError("Write 'measure', or a table such as: windows 0.1 0.15 0.2; head 0.07.") from error

    def show(self, value: Costs | None) -> str:
        if value is None:
            return "measure"
        windows = " ".join(["windows", *(f"{cost:g}" for cost in value.windows)])
        return "; ".join([windows, *(f"{kind} {cost:g}" for kind, cost in value.steps)])


def _cost(word: str) -> float:
    if not re.fullmatch(r"\d{1,4}(\.\d{1,9})?", word, re.ASCII):
        raise ValueError(word)
    return float(word)
