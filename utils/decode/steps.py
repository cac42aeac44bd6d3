"""What a decoder yields: one Step per round, host values only.

Every decoder (plain, speculative, n-gram assisted, beam) speaks in these, so that clocks, screens, files and statistics are written once
and cannot tell which decoder ran. Nothing here knows models, text or time.
"""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a run ended."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Step:
    """One round: the drafts that were judged, how many were accepted, and the token the target added.

    drafted: draft ids in order; those behind an accepted end token are not in it.
    accepted: how many of them, from the front, became text.
    token: the corrected or bonus token; None where an accepted end token ended the run.
    finish: set on the last step only.
    forwards: target forward passes this round cost.
    """

    drafted: tuple[int, ...]
    accepted: int
    token: int | None
    finish: FinishReason | None = None
    forwards: int = 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens of this round."""
        kept = self.drafted[: self.accepted]
        return kept if self.token is None else (*kept, self.token)

    @property
    def is_bonus(self) -> bool:
        """Whether the added token follows drafts that were all accepted."""
        return self.token is not None and self.accepted == len(self.drafted)
