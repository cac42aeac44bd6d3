"""Totals of one or several answers, whoever computed them: what rates over several runs and benchmarks need.

A count is None if it is unknown for one of the answers: servers do not count everything.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of answers. `forwards` are forward passes of the target, and `rounds` those that verify drafts or decode.

    `by_position` has the number of rounds that accepted the first, second, ... draft. It is None if it is unknown.
    """

    tokens: int | None
    seconds: float
    drafted: int | None = None
    accepted: int | None = None
    forwards: int | None = None
    rounds: int | None = None
    by_position: tuple[int, ...] | None = None

    @classmethod
    def of(cls, parts: Iterable["Totals"]) -> Self:
        """The sum of several totals."""
        parts = list(parts)
        positions = [part.by_position for part in parts if part.by_position is not None]
        longest = zip_longest(*positions, fillvalue=0)
        return cls(
            _sum([part.tokens for part in parts]),
            sum(part.seconds for part in parts),
            drafted=_sum([part.drafted for part in parts]),
            accepted=_sum([part.accepted for part in parts]),
            forwards=_sum([part.forwards for part in parts]),
            rounds=_sum([part.rounds for part in parts]),
            by_position=tuple(map(sum, longest)) if len(positions) == len(parts) else None,
        )

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def tokens_per_forward(self) -> float | None:
        return self.tokens / self.forwards if self.tokens and self.forwards else None


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum, or None if one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) and known else None
