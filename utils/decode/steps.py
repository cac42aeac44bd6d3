"""What a decoder yields: one Step per round, host values only.

Every decoder (autoregressive, speculative, n-gram assisted, beam search) yields Steps, so that clocks, screens, files
and statistics are written once. Nothing here knows models, text or time.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a run ended."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"


class Leaf(NamedTuple):
    """A draft beside the chain. place: index of the chain's draft that it could replace. token: its id."""

    place: int
    token: int


@dataclass(frozen=True, slots=True)
class Step:
    """One round: the drafts that were verified, how many were accepted, and the token the target added.

    drafted: draft ids of the chain in order, without those after an accepted end token.
    accepted: how many of them, from the front, were accepted.
    token: the corrected or bonus token. None if an accepted end token ended the run.
    finish: set on the last step only.
    forwards: target forward passes in this round.
    leaves: drafts beside the chain. leaf: index of the accepted one, which follows the accepted drafts of the chain.
    """

    drafted: tuple[int, ...]
    accepted: int
    token: int | None
    finish: FinishReason | None = None
    forwards: int = 1
    leaves: tuple[Leaf, ...] = ()
    leaf: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens of this round."""
        added = () if self.leaf is None else (self.leaves[self.leaf].token,)
        return (*self.drafted[: self.accepted], *added, *(() if self.token is None else (self.token,)))

    @property
    def all_drafted(self) -> int:
        """The number of verified drafts, leaves included."""
        return len(self.drafted) + len(self.leaves)

    @property
    def all_accepted(self) -> int:
        """The number of accepted drafts, the leaf included."""
        return self.accepted + (self.leaf is not None)

    @property
    def is_bonus(self) -> bool:
        """Whether the added token is a bonus token: it follows an accepted leaf, or a chain of which no draft was
        rejected.
        """
        return self.token is not None and (self.leaf is not None or self.accepted == len(self.drafted))
