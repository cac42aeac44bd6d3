"""Whether two tokens are a near-tie for a server: by how much it prefers one, and how far equal contexts move that.

A server computes a position in a decode step or, as part of a prompt, in a prefill. Both are correct, and they round
differently, as a verify pass does; so do steps in batches of other sizes. If that moves log-probabilities by half of
the gap between two tokens, either can win. Only the server without speculation is asked: llama.cpp gives none for
drafts that it accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from utils.commands.servers.text_trials import Output, ask
from utils.errors import UserError
from utils.metrics.results import first_difference
from utils.servers.completion import ServerCompletion
from utils.servers.connection import Connection
from utils.servers.engines.logprobs import Position, logprob_positions
from utils.servers.request import ServerRequest

CANDIDATES = 5  # OpenAI's protocol allows no more
NEARBY = 4  # positions that are also computed in a prefill, or under load
Pairs = list[tuple[Position, Position]]  # the same position after the same tokens, computed alone and in another way


class Cause(StrEnum):
    """Why a text differs from the baseline's."""

    TIE = "rounding tie"
    BUG = "not a near-tie"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Tie:
    """gap: how much more log-probability the baseline gives to its own token; at least that much if the other token is
    not among the candidates. moved: how far the same log-probabilities differ between decode steps and prefills, and
    between steps alone and under load.
    """

    cause: Cause
    gap: float | None = None
    moved: float | None = None


def examine(
    baseline: Connection,
    request: ServerRequest,
    theirs: Output,
    ours: Output,
    *,
    loaded: Sequence[ServerCompletion] = (),
) -> Tie:
    """Whether the baseline's tokens at the first difference are a near-tie. Raises UserError if it cannot be asked.

    loaded: the baseline's answers to this request under load, with log-probabilities, for a difference under load.
    """
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
    pairs = [(one, other) for one, other in zip(decoded[first:], prefilled, strict=True) if other is not None]
    pairs += [pair for answer in loaded for pair in _under_load(decoded, theirs.token_ids, answer)]
    # A prefill that prefers the other token by itself shows that either can win.
    again = prefilled[-1]
    flips = again is not None and bool(again.top) and again.top[0][0] == ours.token_ids[place]
    return judge(decoded[-1], pairs, (theirs.token_ids[place], ours.token_ids[place]), flips=flips)


def judge(last: Position, pairs: Pairs, tokens: tuple[int, int], *, flips: bool = False) -> Tie:
    """Whether a position is a near-tie between two tokens, the baseline's and the other one.

    pairs: this position or earlier ones. flips: whether another computation prefers the other token.
    """
    if not pairs or not last.top:
        return Tie(Cause.UNKNOWN)
    differences = (
        abs(logprob - again)
        for one, other in pairs
        for token, logprob in one.top
        if (again := other.of(token)) is not None
    )
    moved, gap = max(differences, default=0.0), _gap(last, *tokens)
    return Tie(Cause.TIE if flips or gap <= 2 * moved else Cause.BUG, gap, moved)


def _under_load(alone: Sequence[Position], tokens: Sequence[int], answer: ServerCompletion) -> Pairs:
    """The last positions that an answer under load has in common with the text alone.

    Where it takes another token it is itself the difference to be explained, and no measure of rounding.
    """
    positions = logprob_positions(answer)
    if answer.token_ids is None or len(positions) != len(answer.token_ids):
        return []
    other = first_difference(tokens, answer.token_ids)
    end = min(len(alone), len(positions) if other is None else other)
    first = max(0, end - NEARBY)
    return list(zip(alone[first:end], positions[first:end], strict=True))


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
