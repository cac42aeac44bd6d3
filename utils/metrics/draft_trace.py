"""Notes on drafts, for whoever wants to see why they stood or fell: what the target made of each, and where it came from.

The notebook stands outside, around the drafter, as the stopwatch does: the loop does not know of it. While a round runs it keeps what
passes by; the notes are worked out when they are read, outside of any clock. Probabilities are those of the raw logits, before the
processor: under greedy those that are judged by are 0 and 1, and say nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from utils.decode.steps import Step

NEAR = 0.1  # of the probability of what the target said: so much makes a near miss


@dataclass(frozen=True, slots=True)
class DraftNote:
    """A draft that was judged. p, rank: its probability in the target, and its place there from 1. q: its probability in the drafter.

    chance: with which the rule lets it stand, min(1, p/q) of the processed laws; None where drafts have no law, or are judged together.
    wanted: what stands at its place, with wanted_p. match: tokens of context that an n-gram or match went by. origin: where that was.
    """

    token: int
    p: float
    rank: int
    q: float | None
    chance: float | None
    wanted: int
    wanted_p: float
    match: int | None = None
    origin: str = ""

    @property
    def stood(self) -> bool:
        return self.token == self.wanted

    @property
    def ratio(self) -> float:
        """p/q; for a draft that has no q of its own p, since it was all that was proposed."""
        return self.p / self.q if self.q else self.p

    @property
    def is_near(self) -> bool:
        return self.p >= NEAR * self.wanted_p


@dataclass(slots=True)
class Round:
    """What passed by in a round."""

    draft: Any
    start: int
    context: list[int]
    logits: Tensor
    law: Tensor


class Notebook:
    """judged: whether drafts that have a law are judged one by one by p/q."""

    def __init__(self, *, judged: bool = True) -> None:
        self._judged = judged
        self._prompt: list[int] = []
        self._origin = 0
        self._draft: Any = None
        self._round: Round | None = None

    def begins(self, prompt: list[int], context: list[int]) -> None:
        self._prompt, self._origin, self._draft = list(prompt), len(context), None

    def proposed(self, draft: Any) -> None:
        self._draft = draft

    def committed(self, context: list[int], verified: Any) -> None:
        draft, self._draft = self._draft, None
        self._round = None if draft is None else Round(draft, verified.start, context, verified.logits, verified.law)

    def read(self, step: Step) -> tuple[DraftNote, ...]:
        """A note on each draft of the round that was judged: those that stood, and the first that did not."""
        told, self._round = self._round, None
        if told is None:
            return ()
        judged = step.drafted[: step.accepted + 1]
        return tuple(self._note(told, place, token, step) for place, token in enumerate(judged))

    def _note(self, told: Round, place: int, token: int, step: Step) -> DraftNote:
        row = told.logits[place]
        wanted = token if place < step.accepted or step.token is None else step.token
        said, sizes = told.draft.said, told.draft.matched
        match = sizes[place] if sizes else None
        return DraftNote(
            token=token,
            p=probability(row, token),
            rank=rank(row, token),
            q=probability(said[place][0], token) if said else None,
            chance=self._chance(told, place, token),
            wanted=wanted,
            wanted_p=probability(row, wanted),
            match=match,
            origin="" if match is None else self._origin_of(told, place, token, match),
        )

    def _chance(self, told: Round, place: int, token: int) -> float | None:
        probs = told.draft.probs
        if probs is None or not self._judged:
            return None
        return min(1.0, told.law[place, token].item() / probs[place, token].item())

    def _origin_of(self, told: Round, place: int, token: int, size: int) -> str:
        if not size:
            return "the seed"
        before = told.context[: told.start]
        found = [*before, *told.draft.tokens[:place]][-size:]
        if holds(self._prompt, [*found, token]):
            return "the prompt"
        if holds(before, [*found, token]):
            return "the answer"
        places = range(max(self._origin, size), told.start)
        rivals = told.draft.runners_up
        if rivals and any(
            before[index - size : index] == found and token in rivals[index - self._origin] for index in places
        ):
            return "the target's runners-up"
        return "an earlier prompt"


def probability(row: Tensor, token: int) -> float:
    """Of a token by raw logits (V,)."""
    return float(row.cpu().double().softmax(-1)[token]) if token < len(row) else 0.0


def rank(row: Tensor, token: int) -> int:
    """A token's place by raw logits (V,), from 1; among equals by the id."""
    above = (row > row[token]).sum() + (row[:token] == row[token]).sum()
    return 1 + int(above)


def holds(text: Sequence[int], part: Sequence[int]) -> bool:
    """Whether these tokens stand somewhere in a text, one behind the other."""
    size = len(part)
    return any(text[index] == part[0] and text[index : index + size] == part for index in range(len(text) - size + 1))


class NotedDrafter:
    """A drafter (sampling.drafters.model.Drafter) that a notebook looks at."""

    def __init__(self, drafter: Any, notebook: Notebook) -> None:
        self._drafter, self._notebook = drafter, notebook

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._notebook.begins(prompt, context)
        self._drafter.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Any:
        draft = self._drafter.propose(context, count)
        self._notebook.proposed(draft)
        return draft

    def commit(self, context: list[int], verified: Any) -> None:
        self._notebook.committed(context, verified)
        self._drafter.commit(context, verified)
