"""The contract between the draft-verify loop and its drafters: Draft, Verified and the Drafter protocol.

It lives below all drafters and all observers, so that a stopwatch or a trace sees the same types as the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftEvidence:
    """Why these k tokens were drafted. Collected only while something observes the run.

    `logits` are the drafter's raw logits (1, V') that each draft was drawn from. `match_lengths` are the numbers of
    context tokens that matched, 0 for none.
    """

    logits: Sequence[Tensor] = ()
    match_lengths: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafts of one round.

    `tokens` are k proposed ids. `probs` is the distribution q (k, V) each was drawn from; None if q is one-hot, or if
    the drafts share the target's noise. `withheld` counts drafts that were computed but not proposed. `kind` is the
    drafter kind, if several take turns. `evidence` is for observers only.
    """

    tokens: list[int]
    probs: Tensor | None = None
    withheld: int = 0
    kind: str = ""
    evidence: DraftEvidence | None = None


NO_DRAFT = Draft([])


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's output for a round that began at context length `start`.

    `logits` are raw (k+1, V), and `probs` is the processed distribution p (k+1, V). `features` are the hidden states
    (T, F) of the rows fed since the last round, ending with the last draft's row; None if the target's session keeps
    none. The first `forced` of the k drafts are tokens that a grammar forces: no drafter has proposed them.
    """

    start: int
    logits: Tensor
    probs: Tensor
    features: Tensor | None = None
    forced: int = 0

    @property
    def drafted_from(self) -> int:
        """The context length at which the drafter's own drafts began."""
        return self.start + self.forced


class Drafter(Protocol):
    """Proposes tokens for the target to verify, and keeps its own state (a cache, a storage)."""

    def begin(self, prompt: list[int], context: list[int]) -> None:
        """Start a run. `context` is what new tokens are appended to; it differs from the prompt for encoder-decoder
        targets.
        """

    def propose(self, context: list[int], count: int) -> Draft:
        """At most `count` drafts for what follows the context. Fewer, or none, is allowed. The context may end with
        tokens that a grammar forces and that the target has yet to read.
        """

    def commit(self, context: list[int], verified: Verified) -> None:
        """Take note of the context after the round, and of the target's output in it."""
