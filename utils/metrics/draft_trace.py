"""Why drafts were accepted or rejected: their probabilities under the target and under the drafter.

The tracer takes the drafter's place, so the loop does not know of it. It stores references during a
round and computes when it is read, outside every clock. Probabilities are those of the raw logits: under greedy
decoding the processed ones are 0 or 1 and explain nothing.
"""

from dataclasses import dataclass

from torch import Tensor

from utils.decode.drafts import Draft, Drafter, DraftEvidence, Verified
from utils.decode.steps import Step

NEAR_MISS = 0.1  # a rejected draft with at least this share of the target token's probability


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """One verified draft.

    `p` and `rank` (from 1) are its probability and rank under the target, `q` is its probability under the drafter.
    `acceptance` is min(1, p/q) of the processed distributions, or None if drafts have no distribution or are verified
    together. `target_token` is the token in the text at its position, with probability `target_p`. `match_length` is
    the number of context tokens that found an n-gram or a match, 0 if the draft was drawn from the seed.
    """

    token: int
    p: float
    rank: int
    q: float | None
    acceptance: float | None
    target_token: int
    target_p: float
    match_length: int | None = None

    @property
    def is_accepted(self) -> bool:
        return self.token == self.target_token

    @property
    def ratio(self) -> float:
        """p/q. A draft without a q was the only proposal, so q = 1."""
        return self.p / self.q if self.q else self.p

    @property
    def is_near_miss(self) -> bool:
        return self.p >= NEAR_MISS * self.target_p


class DraftTracer:
    """Traces the drafts of a run. `accepts_by_ratio` is True if drafts are accepted one by one by p/q."""

    def __init__(self, *, accepts_by_ratio: bool = True) -> None:
        self._accepts_by_ratio = accepts_by_ratio
        self._drafter: Drafter
        self._draft: Draft | None = None
        self._round: tuple[Draft, Verified] | None = None

    def around(self, drafter: Drafter) -> "DraftTracer":
        """The tracer itself, as a drafter that forwards to this one."""
        self._drafter = drafter
        return self

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._draft = None
        self._drafter.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        self._draft = self._drafter.propose(context, count)
        return self._draft

    def commit(self, context: list[int], verified: Verified) -> None:
        draft, self._draft = self._draft, None
        # With first_target, the first round has no draft.
        self._round = None if draft is None else (draft, verified)
        self._drafter.commit(context, verified)

    def read(self, step: Step) -> tuple[DraftTrace, ...]:
        """A trace of each draft that was verified: the accepted ones, and the first rejected one."""
        last, self._round = self._round, None
        if last is None:
            return ()
        verified = min(len(step.drafted), step.accepted + 1)
        return tuple(self._trace(*last, index, step) for index in range(verified))

    def _trace(self, draft: Draft, verified: Verified, index: int, step: Step) -> DraftTrace:
        row, evidence = verified.logits[index], draft.evidence or DraftEvidence()  # (V,)
        token, target_token = step.drafted[index], step.tokens[index]
        logits, lengths = evidence.logits, evidence.match_lengths
        q = draft.probs if self._accepts_by_ratio else None
        return DraftTrace(
            token=token,
            p=probability(row, token),
            rank=rank(row, token),
            q=probability(logits[index][0], token) if logits else None,
            # q > 0, since the token was drawn from it.
            acceptance=None if q is None else min(1.0, float(verified.probs[index, token] / q[index, token])),
            target_token=target_token,
            target_p=probability(row, target_token),
            match_length=lengths[index] if lengths else None,
        )


def probability(logits: Tensor, token: int) -> float:
    """The probability of a token under raw logits (V,)."""
    # A drafter's vocabulary may end before this id.
    return float(logits.cpu().double().softmax(-1)[token]) if token < len(logits) else 0.0


def rank(logits: Tensor, token: int) -> int:
    """The rank of a token by raw logits (V,), from 1. Ties are broken by the lowest id."""
    above = (logits > logits[token]).sum() + (logits[:token] == logits[token]).sum()
    return 1 + int(above)
