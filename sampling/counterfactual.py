"""Counterfactual replay: the rounds that another gamma would have taken on a finished text, without decoding.

While its drafts match, a drafter reads the target's own text. So its drafts after each prefix of that text can be
obtained by leading it through: one round per token, nothing accepted. The draft-verify loop then runs over the
recorded drafts, verified by the text instead of the target. Rounds and acceptance are those of real runs if the text
does not depend on the drafts (greedy, `coupled`); otherwise they are an estimate. For texts that others have generated
with drafts, `expected_counts` has the acceptance that these drafts should have had.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sampling.speculative import speculative_steps
from utils.decode.decoding import Decoding
from utils.decode.drafts import Draft, Drafter, Verified
from utils.decode.noise import Domain, Noise
from utils.decode.steps import Step, matching_prefix
from utils.logits_processor import GreedyProcessor, MultinomialProcessor
from utils.metrics.results import RoundTiming, Stopwatch, TimedDrafter

NOT_A_TOKEN = -1


@dataclass(frozen=True, slots=True)
class FinishedText:
    """A text, and what the target computed for it.

    `prompt` has its ids, `context` is the decoder's first context, and `tokens` are the T new ones. `logits` (T, V) are
    the target's; row i predicts token i. `features` are its hidden states of all C + T - 1 rows fed for a context of
    length C, if they were kept. `name` and `context_length` are the target's.
    """

    prompt: list[int]
    context: list[int]
    tokens: list[int]
    logits: Tensor
    features: Tensor | None
    name: str
    context_length: int | None


class TextSession:
    """A target session that returns what is known of a finished text. Rows after a draft that is not in the text mean
    nothing.
    """

    def __init__(self, text: FinishedText) -> None:
        self.name, self._text = text.name, text
        self._previous = self._fed = self._kept = 0  # positions before the last feed, after it, and after the rewind

    def begin(self, prompt: list[int]) -> list[int]:
        return list(self._text.context)

    def room(self, context: list[int]) -> int | None:
        bound = self._text.context_length
        return None if bound is None else bound - len(context)

    def feed(self, context: list[int], keep: int) -> Tensor:
        first = len(context) - keep + 1 - len(self._text.context)  # the new token that row 0 predicts
        # A cached session would compute the rows since the last rewind, and only those have new features.
        self._previous, self._fed = self._kept, len(context)
        return _rows(self._text.logits, first, first + keep)

    def rewind(self, length: int) -> None:
        self._kept = min(self._fed, length)

    def take_features(self) -> Tensor | None:
        features = self._text.features
        return None if features is None else _rows(features, self._previous, self._fed)


def _rows(table: Tensor, first: int, end: int) -> Tensor:
    """Rows of a table, the last one repeated beyond its end."""
    return table[torch.arange(first, end).clamp(max=len(table) - 1).to(table.device)]


def _verify_by_text(tokens: list[int], probs: Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
    """Accept the drafts which equal a text."""
    accepted = matching_prefix(draft.tokens, tokens[start:])
    # Clamped: after an accepted end token the loop discards this token.
    return accepted, tokens[min(start + accepted, len(tokens) - 1)]


@dataclass(frozen=True, slots=True)
class RecordedDrafter:
    """Proposes the drafts recorded after the same prefix of the text. `origin` is the length of the first context."""

    drafts: Sequence[Draft]
    origin: int

    def begin(self, prompt: list[int], context: list[int]) -> None:
        """Nothing to prepare."""

    def propose(self, context: list[int], count: int) -> Draft:
        recorded = self.drafts[len(context) - self.origin]
        return Draft(recorded.tokens[:count], kind=recorded.kind)

    def commit(self, context: list[int], verified: Verified) -> None:
        """Nothing to learn."""


def _led(text: FinishedText, drafter: Drafter) -> Iterator[list[int]]:
    """The contexts before each token of the text. Between them the drafter is led on by that token."""
    target, context = TextSession(text), list(text.context)
    drafter.begin(text.prompt, list(context))
    for token in text.tokens:
        yield context
        start, logits = len(context), target.feed(context, keep=1)
        context = [*context, token]
        target.rewind(start)
        drafter.commit(context, Verified(start, logits, logits.softmax(-1), target.take_features()))


def drafts_along(text: FinishedText, drafter: Drafter, count: int) -> Iterator[Draft]:
    """The drafts, at most `count`, that a drafter proposes after each prefix of the text."""
    for context in _led(text, drafter):
        draft = drafter.propose(context, count)
        yield Draft(list(draft.tokens), kind=draft.kind)


def chain_single_drafts(single: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Rounds of drafts from the single draft, or none, after each prefix: a draft after a matching one was drafted
    after it.

    What follows a draft that does not match, or the end of the text, is unknown and not needed: it counts as drafted
    and cannot be accepted.
    """
    rounds: list[list[int]] = []
    for position in range(len(single)):
        following = [list(drafts[:1]) for drafts in single[position : position + count]]
        # A position without a draft ends the round there. A round cut by the text's end is filled up to `count`.
        until = following.index([]) if [] in following else None
        known = [token for drafts in following[:until] for token in drafts]
        rounds.append(known if until is not None else known + [NOT_A_TOKEN] * (count - len(known)))
    return rounds


def replay(
    text: FinishedText, drafter: Drafter, decoding: Decoding, *, gamma: int
) -> tuple[list[Step], list[RoundTiming]]:
    """The rounds of the draft-verify loop along the text. Their timings have only numbers of drafts.

    `decoding` is that of the run that generated the text.
    """
    ended = text.tokens[-1] in decoding.end_ids
    length = decoding.max_new if ended else len(text.tokens)  # a text that did not end was as long as requested
    greedy = replace(decoding, processor=GreedyProcessor(), max_new=length)  # the distributions are not used
    watch = Stopwatch()
    timed, rule = TimedDrafter(drafter, watch), partial(_verify_by_text, text.tokens)
    steps = speculative_steps(text.prompt, timed, TextSession(text), greedy, gamma=gamma, rule=rule)
    rounds = [(step, watch.read(0)) for step in steps]
    return [step for step, _ in rounds], [timing for _, timing in rounds]


@dataclass(frozen=True, slots=True)
class TextNoise(Noise):
    """Noise with which a drafter draws the tokens of a text, so that all of its drafts are teacher-forced."""

    tokens: tuple[int, ...] = ()

    def pick(self, weights: Tensor, domain: Domain, position: int, start: int) -> int:
        token = self.tokens[min(position, len(self.tokens) - 1)]
        return token if token < len(weights) else int(weights.argmax())  # q does not reach beyond its vocabulary


def expected_counts(
    text: FinishedText, drafter: Drafter, temperature: float, count: int, *, counts_ends: bool = False
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The expected (accepted, verified) of each draft position if `count` drafts a round led to this text: for drafts
    drawn from q, and for drafts of the highest q.

    `drafter` must draw with TextNoise of the text. The target has sampled the text at the temperature, or greedily at
    0. Given the text, a draft that is token y of it was accepted with probability min(1, q(y) / p(y)), so no random
    draft is needed. The first token comes from the prefill and is not drafted. The last drafts of a text are shorter;
    with `counts_ends`, the position after such a draft counts as verified.
    """
    size = len(text.tokens)
    chances = [[0.0] * (size + count + 1) for _ in range(2)]  # of a round that begins at each token, by kind of drafts
    chances[0][1] = chances[1][1] = 1.0
    totals = [[[0.0, 0.0] for _ in range(count)] for _ in range(2)]
    for place, context in enumerate(_led(text, drafter)):
        if place and (chances[0][place] or chances[1][place]):
            draft = drafter.propose(context, min(count, size - place - 1))  # as the loop: none for the last token
            rates = _chances(text, draft, place, temperature)
            for kind in range(2):
                _follow(rates[kind], chances[kind], totals[kind], place, counts_ends=counts_ends)
    drawn, likeliest = ([(accepted, verified) for accepted, verified in kind] for kind in totals)
    return drawn, likeliest


def _chances(text: FinishedText, draft: Draft, place: int, temperature: float) -> tuple[list[float], list[float]]:
    """The probability that each draft is accepted after those before it, drawn from q or of the highest q."""
    drawn, likeliest = list[float](), list[float]()
    for row, token in zip(() if draft.probs is None else draft.probs, text.tokens[place:], strict=False):
        is_top = float(int(row.argmax()) == token)
        likeliest.append(is_top)
        if not temperature:
            drawn.append(is_top)
            continue
        p = float(MultinomialProcessor(temperature)(text.logits[place + len(drawn)][None])[0, token])
        q = float(row[token])
        drawn.append(min(1.0, q / p) if p else float(q > 0))
    return drawn, likeliest


def _follow(
    rates: list[float], chances: list[float], totals: list[list[float]], place: int, *, counts_ends: bool
) -> None:
    """Add a round that begins at `place` to the totals, and its ends to the beginnings of the next round."""
    reached = chances[place]
    for index, rate in enumerate(rates):
        totals[index][0] += reached * rate
        totals[index][1] += reached
        chances[place + index + 1] += reached * (1 - rate)
        reached *= rate
    if counts_ends and 0 < len(rates) < len(totals):
        totals[len(rates)][1] += reached
    chances[place + len(rates) + 1] += reached
