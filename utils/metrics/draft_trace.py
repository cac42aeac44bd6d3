"""Why drafts were accepted or rejected: their probabilities under the target, and their origin.

The tracer takes the drafter's place, so the loop does not know of it. It stores references during a
round and computes when it is read, outside every clock. Probabilities are those of the raw logits: under greedy
decoding the processed ones are 0 or 1 and explain nothing.
"""

from collections.abc import Sequence
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
    the number of context tokens that found an n-gram or a match, and `origin` the position of the match.
    """

    token: int
    p: float
    rank: int
    q: float | None
    acceptance: float | None
    target_token: int
    target_p: float
    match_length: int | None = None
    origin: str = ""

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


@dataclass(frozen=True, slots=True)
class Round:
    """The exchange between the loop and the drafter in one round."""

    draft: Draft
    context: list[int]
    verified: Verified

    @property
    def evidence(self) -> DraftEvidence:
        return self.draft.evidence or DraftEvidence()


class DraftTracer:
    """Traces the drafts of a run. `accepts_by_ratio` is True if drafts are accepted one by one by p/q."""

    def __init__(self, *, accepts_by_ratio: bool = True) -> None:
        self._accepts_by_ratio = accepts_by_ratio
        self._drafter: Drafter
        self._prompt: list[int] = []
        self._origin = 0  # context length before the first new token
        self._draft: Draft | None = None
        self._round: Round | None = None

    def around(self, drafter: Drafter) -> "DraftTracer":
        """The tracer itself, as a drafter that forwards to this one."""
        self._drafter = drafter
        return self

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._prompt, self._origin, self._draft = list(prompt), len(context), None
        self._drafter.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        self._draft = self._drafter.propose(context, count)
        return self._draft

    def commit(self, context: list[int], verified: Verified) -> None:
        draft, self._draft = self._draft, None
        # With first_target, the first round has no draft.
        self._round = None if draft is None else Round(draft, context, verified)
        self._drafter.commit(context, verified)

    def read(self, step: Step) -> tuple[DraftTrace, ...]:
        """A trace of each draft that was verified: the accepted ones, and the first rejected one."""
        last, self._round = self._round, None
        if last is None:
            return ()
        verified = step.drafted[: step.accepted + 1]
        return tuple(self._trace(last, index, token, step) for index, token in enumerate(verified))

    def _trace(self, last: Round, index: int, token: int, step: Step) -> DraftTrace:
        row = last.verified.logits[index]  # (V,)
        target_token = step.tokens[index]
        logits, lengths = last.evidence.logits, last.evidence.match_lengths
        match_length = lengths[index] if lengths else None
        return DraftTrace(
            token=token,
            p=probability(row, token),
            rank=rank(row, token),
            q=probability(logits[index][0], token) if logits else None,
            acceptance=self._acceptance(last, index, token),
            target_token=target_token,
            target_p=probability(row, target_token),
            match_length=match_length,
            origin="" if match_length is None else self._origin_of(last, index, token, match_length),
        )

    def _acceptance(self, last: Round, index: int, token: int) -> float | None:
        q = last.draft.probs
        if q is None or not self._accepts_by_ratio:
            return None
        # q > 0, since the token was drawn from it.
        return min(1.0, last.verified.probs[index, token].item() / q[index, token].item())

    def _origin_of(self, last: Round, index: int, token: int, size: int) -> str:
        if not size:
            return "the seed"
        # Storages do not record where an n-gram came from, so the possible sources are searched in turn.
        before = last.context[: last.verified.start]
        match = [*before, *last.draft.tokens[:index]][-size:]
        if contains(self._prompt, [*match, token]):
            return "the prompt"
        if contains(before, [*match, token]):
            return "the answer"
        ends = range(max(self._origin, size), last.verified.start)
        runners_up = last.evidence.runners_up
        if runners_up and any(
            before[end - size : end] == match and token in runners_up[end - self._origin] for end in ends
        ):
            return "the target's runners-up"
        return "an earlier prompt"


def probability(logits: Tensor, token: int) -> float:
    """The probability of a token under raw logits (V,)."""
    # A drafter's vocabulary may end before this id.
    return float(logits.cpu().double().softmax(-1)[token]) if token < len(logits) else 0.0


def rank(logits: Tensor, token: int) -> int:
    """The rank of a token by raw logits (V,), from 1. Ties are broken by the lowest id."""
    above = (logits > logits[token]).sum() + (logits[:token] == logits[token]).sum()
    return 1 + int(above)


def contains(text: Sequence[int], part: Sequence[int]) -> bool:
    """Whether these tokens occur consecutively in a text."""
    size = len(part)
    return any(text[index] == part[0] and text[index : index + size] == part for index in range(len(text) - size + 1))
