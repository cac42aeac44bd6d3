"""Value types of the settings about drafting: the number of drafts, the drafter kinds and the cost table."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        try:
            return _table(text)
        except ValueError as error:
            raise UserError(f"Write 'measure', or a table such as: {COST_TABLE_EXAMPLE}.") from error

    def show(self, value: Costs | None) -> str:
        return "measure" if value is None else "; ".join(_parts(value))


def _table(text: str) -> Costs:
    """A table that `_parts` writes. Raises ValueError for anything else."""
    parts = [part.split() for part in text.split(";")]
    starts = [index for index, part in enumerate(parts) if part[:1] == ["at"]]
    # Tables of older files and records have no context length.
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
    """The table of one context length. Unpacking raises ValueError as well where a word is missing."""
    if parts[0][:1] != ["at"]:
        parts = [["at", "0"], *parts]
    (_, length, *step), (name, *verify), *others = parts
    reading = [part[1:] for part in others if part[:1] == ["read"]]
    drafting = [part for part in others if part[:1] != ["read"]]
    if name not in VERIFY_WORDS or any(len(cost) != 2 for cost in (*drafting, *reading)) or len(step) > 1:
        raise ValueError(name)
    draft, read = ({kind: _cost(word) for kind, word in costs} for costs in (drafting, reading))
    ratio = _cost(step[0]) if step else 1.0
    return Costs.of([_cost(word) for word in verify], draft, read, length=_length(length), step=ratio)


def _parts(costs: Costs) -> list[str]:
    """The parts of a table as they are typed."""
    step = [] if costs.step == 1 else [f"{costs.step:g}"]
    parts = [" ".join(["at", str(costs.length), *step])] if costs.length else []
    parts.append(" ".join([VERIFY_WORDS[0], *(f"{cost:g}" for cost in costs.verify)]))
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
