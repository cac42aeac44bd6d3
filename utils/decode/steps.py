"""What a decoder yields: one Step per round, host values only.

Every decoder (autoregressive, speculative, n-gram assisted, beam search) yields Steps, so that clocks, screens, files
and statistics are written once. Nothing here knows models, text or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile


class FinishReason(StrEnum):
    """Why a run ended."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Step:
    """One round: the drafts that were verified, how many were accepted, and the token the target added.

    drafted: draft ids in order, without those after an accepted end token.
    accepted: how many of them, from the front, were accepted.
    token: the corrected or bonus token. None if an accepted end token ended the run.
    finish: set on the last step only.
    forced: indices of drafts that are the only token which a grammar allows.
    forwards: target forward passes in this round.
    """

    drafted: tuple[int, ...]
    accepted: int
    token: int | None
    finish: FinishReason | None = None
    forwards: int = 1
    forced: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens of this round."""
        kept = self.drafted[: self.accepted]
        return kept if self.token is None else (*kept, self.token)

    @property
    def draft_counts(self) -> tuple[int, int]:
        """The numbers of drafts and of accepted drafts, without those that a grammar forces."""
        return len(self.drafted) - len(self.forced), self.accepted - self.accepted_forced

    @property
    def accepted_forced(self) -> int:
        return sum(index < self.accepted for index in self.forced)

    @property
    def is_bonus(self) -> bool:
        """Whether all drafts were accepted, so that the added token is a bonus token."""
        return self.token is not None and self.accepted == len(self.drafted)


def by_position(rounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(accepted, verified) for each draft position, from the drafted and accepted drafts of each round. A draft is
    verified if all drafts before it were accepted.
    """
    return [
        (
            sum(accepted > position for _, accepted in rounds),
            sum(drafted > position and accepted >= position for drafted, accepted in rounds),
        )
        for position in range(max((drafted for drafted, _ in rounds), default=0))
    ]


def matching_prefix(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """The number of entries, from the front, that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
