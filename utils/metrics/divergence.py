"""Why a text left the target's own: where, with which tokens, and whether that is sampling, a rounding tie, or a bug.

Under greedy and under noise that is shared with the target the two must be one text, but for rounding: the same position computed in a
window of another width may come out a little different, and flip a choice between two tokens that are nearly tied. First the tie is
looked for: do the logits, moved by no more than widths move them on this machine, give either token? If that explains nothing, both runs'
forwards are repeated exactly as they were, and must give each its own token with a difference that rounding can make.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from utils.decode.decoding import Decoding
from utils.decode.logit_drift import Spread, by_width, most_rounding
from utils.decode.model_session import ModelSession
from utils.decode.steps import Step
from utils.logits_processor import top_tokens
from utils.metrics.results import first_difference, tokens_of

NEARBY = 32  # tokens before the difference over which widths are compared


class Cause(StrEnum):
    """Why two texts part."""

    SAMPLING = "sampling"
    ROUNDING = "rounding tie"
    UNEXPLAINED = "unexplained: please report"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token, its probability under the processor (under greedy: of the raw logits), and its raw logit."""

    token: int
    probability: float
    logit: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a run and the target's.

    position: 0-based among the new tokens. ours, theirs: the run's token there and the target's, None where a text had ended.
    highest: the target's two highest candidates there. rounding: how far widths move the logits here; None where that was not needed.
    """

    position: int
    ours: Candidate | None
    theirs: Candidate | None
    highest: tuple[Candidate, ...]
    rounding: float | None
    cause: Cause

    @property
    def gap(self) -> float:
        """Between the two highest logits."""
        return self.highest[0].logit - self.highest[-1].logit


@dataclass(frozen=True, slots=True)
class Parting:
    """A run beside the target's own on one prompt, and how the models are reached.

    rounds: the run's. theirs: the target's tokens. opened: a session of its own over the target, `rewinds` or not. window: how many tokens
    the run verified at once. own_noise: whether its drafts were judged by p/q, with noise that the target has no part in.
    """

    prompt: list[int]
    rounds: Sequence[Step]
    theirs: list[int]
    opened: Callable[..., ModelSession]
    decoding: Decoding
    window: int
    own_noise: bool

    @property
    def position(self) -> int:
        """0-based place of the first difference among the new tokens."""
        position = first_difference(tokens_of(self.rounds), self.theirs)
        assert position is not None, "the texts are equal"
        return position

    @property
    def may_sample(self) -> bool:
        """Whether another token is allowed there. A bonus token, or one behind no drafts, is drawn from p with the target's noise."""
        end = 0
        for step in self.rounds:
            end += len(step.tokens)
            if self.position < end:
                return self.own_noise and not (step.is_bonus and self.position == end - 1)
        return False

    @property
    def said(self) -> tuple[int | None, int | None]:
        """The run's token there and the target's, None where a text had ended."""
        position = self.position
        ours, theirs = (
            text[position] if position < len(text) else None for text in (tokens_of(self.rounds), self.theirs)
        )
        return ours, theirs

    def gives(self, logits: Tensor, token: int) -> bool:
        """Whether the target says the token there, from logits (V,); where the run drew numbers of its own, whether that could say it."""
        law = self.decoding.law(logits, "The target")
        could = self.may_sample and token == self.said[0] and float(law[token]) > 0
        return could or self.decoding.noise.sample(law, self.position) == token


def explain(parting: Parting, rounding: float = 0.0) -> Divergence:
    """The cause of the first difference. rounding: how far widths are known to move the logits, where that is more than is seen here."""
    position, (ours, theirs) = parting.position, parting.said
    session = parting.opened(rewinds=False)
    context = [*session.begin(parting.prompt), *parting.theirs[:position]]
    count = min(NEARBY, position + 1)
    if len(context) > count:
        session.feed(context[:-count], keep=1)
    whole = by_width(session, context, count, count)  # (count, V)
    law = parting.decoding.law(whole[-1], session.name)

    shown = law if float(law.max()) < 1 else torch.softmax(whole[-1].float(), dim=-1)

    def candidate(token: int) -> Candidate:
        return Candidate(token, float(shown[token]), float(whole[-1, token]))

    moved, cause = None, Cause.UNEXPLAINED
    if ours is not None and theirs is not None:
        if parting.may_sample and float(law.max()) < 1 and float(law[ours]) > 0:
            cause = Cause.SAMPLING
        else:
            versions = [whole, *(by_width(session, context, count, width) for width in (1, parting.window))]
            moved, cause = _rounding_or_not(parting, versions, ours, theirs, known=rounding)
    return Divergence(
        position,
        None if ours is None else candidate(ours),
        None if theirs is None else candidate(theirs),
        tuple(map(candidate, top_tokens(whole[-1], 2))),
        moved,
        cause,
    )


def _rounding_or_not(
    parting: Parting, versions: list[Tensor], ours: int, theirs: int, *, known: float
) -> tuple[float, Cause]:
    """How far the logits (k, V) of these versions are apart, and whether that explains the two tokens."""
    slack, limit = max(known, Spread.of(versions).difference), most_rounding(versions[0])
    if slack <= limit and _is_tie(parting, versions[0][-1].cpu().double(), ours, theirs, slack=slack):
        return slack, Cause.ROUNDING
    replayed = _replay(parting, ours, theirs)
    if replayed is None or replayed > limit:
        return slack if replayed is None else replayed, Cause.UNEXPLAINED
    return replayed, Cause.ROUNDING


def _is_tie(parting: Parting, logits: Tensor, ours: int, theirs: int, *, slack: float) -> bool:
    """Whether logits (V,) that are moved by at most `slack` give either token."""
    return all(
        any(parting.gives(moved, token) for moved in _moved(logits, token, rival, slack))
        for token, rival in ((ours, theirs), (theirs, ours))
    )


def _moved(logits: Tensor, token: int, rival: int, slack: float) -> list[Tensor]:
    """The two moves that help a token against its rival the most: into a top-k set or a nucleus, and the rival out of it."""
    moves = []
    for judged, up in ((token, -slack), (rival, slack)):
        moved = logits + torch.where(logits > logits[judged], up, -up)
        moved[token], moved[rival] = logits[token] + slack, logits[rival] - slack
        moves.append(moved)
    return moves


def _replay(parting: Parting, ours: int, theirs: int) -> float | None:
    """The largest difference between the logits of both runs, computed by the same forwards as then.

    None where they do not give each run its own token again.
    """
    windows, singles = _window_logits(parting), _single_logits(parting)
    if parting.gives(windows, ours) and parting.gives(singles, theirs):
        return Spread.of([windows[None], singles[None]]).difference
    return None


def _single_logits(parting: Parting) -> Tensor:
    """Logits (V,) of plain decoding at the place of the difference."""
    session = parting.opened(rewinds=False)
    context = session.begin(parting.prompt)
    for token in parting.theirs[: parting.position]:
        session.feed(context, keep=1)
        context.append(token)
    return session.feed(context, keep=1)[0]


def _window_logits(parting: Parting) -> Tensor:
    """Logits (V,) of the run's windows at the place of the difference."""
    session = parting.opened(rewinds=True)
    context = session.begin(parting.prompt)
    left = parting.position
    for step in parting.rounds:
        logits = session.feed([*context, *step.drafted], keep=len(step.drafted) + 1)
        if left < len(step.tokens):
            return logits[left]
        left -= len(step.tokens)
        context.extend(step.tokens)
        session.rewind(len(context) - 1)
    raise AssertionError("the difference lies behind the last round")
