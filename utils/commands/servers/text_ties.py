"""Whether two tokens are a near-tie for a server: by how much it prefers one, and how far equal contexts move that.

A server computes a position in a decode step or, as part of a prompt, in a prefill. Both are correct, and they round
differently, as a verify pass does. If that moves log-probabilities by half of the gap between two tokens, either can
win. Only the server without speculation is asked: llama.cpp gives none for drafts that it accepted.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from utils.commands.servers.text_trials import Output, ask
from utils.errors import UserError
from utils.servers.connection import Connection
from utils.servers.engines.logprobs import Position, logprob_positions
from utils.servers.request import ServerRequest

CANDIDATES = 5  # OpenAI's protocol allows no more
NEARBY = 4  # positions that are also computed in a prefill


class Cause(StrEnum):
    """Why a text differs from the baseline's."""

    TIE = "rounding tie"
    BUG = "not a near-tie"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Tie:
    """gap: how much more log-probability the baseline gives to its own token; at least that much if the other token is
    not among the candidates. moved: how far the same log-probabilities differ between decode steps and prefills.
    """

    cause: Cause
    gap: float | None = None
    moved: float | None = None


def examine(baseline: Connection, request: ServerRequest, theirs: Output, ours: Output) -> Tie:
    """Whether the baseline's tokens at the first difference are a near-tie. Raises UserError if it cannot be asked."""
    place = ours.difference(theirs)
    assert place is not None, "the texts are equal"
    if not isinstance(request.prompt, tuple) or theirs.token_ids is None or ours.token_ids is None:
        return Tie(Cause.UNKNOWN)
    if place >= min(len(theirs.token_ids), len(ours.token_ids)):
        return Tie(Cause.BUG)  # one text merely ends earlier, though both obey the same end tokens and length
    decoded = _decoded(baseline, request, theirs.token_ids[: place + 1])
    if decoded is None:
        return Tie(Cause.UNKNOWN)
    first = max(0, place + 1 - NEARBY)
    prefilled = [_prefilled(baseline, request, theirs.token_ids[:end]) for end in range(first, place + 1)]
    return judge(decoded[first:], prefilled, theirs.token_ids[place], ours.token_ids[place])


def judge(decoded: tuple[Position, ...], prefilled: list[Position | None], theirs: int, ours: int) -> Tie:
    """Whether the last of these positions is a near-tie between two tokens.

    decoded, prefilled: the same positions computed in both ways, the latter None where that failed.
    """
    pairs = [(one, other) for one, other in zip(decoded, prefilled, strict=True) if other is not None]
    if not pairs or not decoded[-1].top:
        return Tie(Cause.UNKNOWN)
    moved = max(
        (
            abs(logprob - again)
            for one, other in pairs
            for token, logprob in one.top
            if (again := other.of(token)) is not None
        ),
        default=0.0,
    )
    gap = _gap(decoded[-1], theirs, ours)
    # A prefill that prefers the other token by itself shows that either can win.
    flips = prefilled[-1] is not None and prefilled[-1].top and prefilled[-1].top[0][0] == ours
    return Tie(Cause.TIE if flips or gap <= 2 * moved else Cause.BUG, gap, moved)


def _gap(position: Position, theirs: int, ours: int) -> float:
    own, other = position.of(theirs), position.of(ours)
    return (position.logprob if own is None else own) - (position.top[-1][1] if other is None else other)


def _decoded(baseline: Connection, request: ServerRequest, tokens: tuple[int, ...]) -> tuple[Position, ...] | None:
    """The positions of these tokens in decode steps, or None if the server does not give the same text again."""
    completion = ask(baseline, replace(request, max_tokens=len(tokens), top_logprobs=CANDIDATES))
    positions = logprob_positions(completion)
    return positions if completion.token_ids == tokens and len(positions) == len(tokens) else None


def _prefilled(baseline: Connection, request: ServerRequest, before: tuple[int, ...]) -> Position | None:
    """The position after these tokens, computed in a prefill."""
    assert isinstance(request.prompt, tuple)
    prompt = (*request.prompt, *before)
    try:
        completion = ask(baseline, replace(request, prompt=prompt, max_tokens=1, top_logprobs=CANDIDATES))
    except UserError:  # for example a context that is one token too long
        return None
    positions = logprob_positions(completion)
    return positions[0] if positions else None
