"""Value types of the settings about drafting: the number of drafts, the drafter kinds and the cost table."""

import re
from dataclasses import dataclass

from utils.bounds import MAX_GAMMA, WholeRange
from utils.config.value_types import Limits, or_auto
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.pairs.drafter_kinds import DRAFTER_KINDS, drafter_kind

COST_TABLE_EXAMPLE = "verify 0.1 0.15 0.2; head 0.07"
VERIFY_WORDS = ("verify", "windows")  # the second one is that of older files and records


@dataclass(frozen=True, slots=True)
class DraftCount:
    """The number of drafts per round, or auto, which is None."""

    usage: str = "N|auto"
    words: tuple[str, ...] = ("auto",)

    def parse(self, text: str, current: int | None, limits: Limits) -> int | None:
        return None if text.lower() == "auto" else or_auto(WholeRange(0, MAX_GAMMA), text)

    def show(self, value: int | None) -> str:
        return "auto" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class DrafterKinds:
    """One or more kinds of drafters. Repeated ones count once."""

    usage: str = "KIND ..."
    words: tuple[str, ...] = tuple(kind.name for kind in DRAFTER_KINDS)

    def parse(self, text: str, current: tuple[str, ...], limits: Limits) -> tuple[str, ...]:
        kinds = tuple(dict.fromkeys(text.lower().split()))
        if not kinds:
            raise UserError(f"Give one or more of {', '.join(self.words)}.")
        for kind in kinds:
            drafter_kind(kind)
        return kinds

    def show(self, value: tuple[str, ...]) -> str:
        return " ".join(value)


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of verifying and drafting on one line. `measure` is None: they are measured before the next run."""

    usage: str = "measure|TABLE"
    words: tuple[str, ...] = ("measure",)

    def parse(self, text: str, current: Costs | None, limits: Limits) -> Costs | None:
        if text.lower() == "measure":
            return None
        parts = [part.split() for part in text.split(";")]
        try:
            # Unpacking raises ValueError as well where a part is empty.
            (name, *verify), *draft = parts
            if name not in VERIFY_WORDS or any(len(cost) != 2 for cost in draft):
                raise ValueError
            return Costs.of([_cost(word) for word in verify], {kind: _cost(word) for kind, word in draft})
        except ValueError as error:
            raise UserError(f"Write 'measure', or a table such as: {COST_TABLE_EXAMPLE}.") from error

    def show(self, value: Costs | None) -> str:
        if value is None:
            return "measure"
        verify = " ".join([VERIFY_WORDS[0], *(f"{cost:g}" for cost in value.verify)])
        return "; ".join([verify, *(f"{kind} {cost:g}" for kind, cost in value.draft)])


def _cost(word: str) -> float:
    # float() would also accept "nan", "inf", signs and exponents.
    if not re.fullmatch(r"\d{1,4}(\.\d{1,9})?", word, re.ASCII):
        raise ValueError(word)
    return float(word)
