"""What another draft length would have come to, told from a finished text: one target pass over it, and no decoding.

While its drafts match, a drafter reads the target's text, so what it proposes behind each prefix of that text can be had by leading it
through: a round per token, nothing accepted. The loop itself then runs over what was proposed, judged by the text instead of the target.
Under greedy and `coupled` the text is the target's whatever is drafted, so rounds and acceptance come out as in real runs; under other
rules they are an estimate, since drafts are then drawn and judged with other noise.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sampling.drafters.model import Draft, Drafter, ModelDrafter, Verified, agreed
from sampling.speculative import speculative_steps
from sampling.verification import RULES
from utils.bounds import AUTO_GAMMA
from utils.comparison.harness import Foreseen
from utils.comparison.strategies import Job, Strategy
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession, context_length, model_name
from utils.decode.noise import Noise
from utils.decode.steps import Step
from utils.logits_processor import GreedyProcessor
from utils.metrics.stopwatch import Lap, Stopwatch, TimedDrafter
from utils.models.draft_head import Grafted

RULE = RULES["coupled"]
NOTHING = -1  # a draft that is no token


@dataclass(frozen=True, slots=True)
class Text:
    """A finished text: the prompt's ids, the decoder's first context, the new tokens, and what the target makes of each of them.

    logits: (T, V), row i in front of token i. features: of all rows fed, (C + T - 1, F) for a context of C, where they were asked for.
    """

    prompt: list[int]
    context: list[int]
    tokens: list[int]
    logits: Tensor
    features: Tensor | None


class ReadSession:
    """A target that has read the text already: it computes nothing. Behind a draft that is not the text its rows mean nothing."""

    def __init__(self, text: Text, model: Any) -> None:
        self.name, self._text, self._bound = model_name(model), text, context_length(model)
        self._held = self._fed = self._kept = 0  # positions before the last feed, behind it, and since the rewind

    def begin(self, prompt: list[int]) -> list[int]:
        return list(self._text.context)

    def room(self, context: list[int]) -> int | None:
        return None if self._bound is None else self._bound - len(context)

    def feed(self, context: list[int], keep: int) -> Tensor:
        first = len(context) - keep + 1 - len(self._text.context)
        self._held, self._fed = self._kept, len(context)
        return self._text.logits[
            torch.arange(first, first + keep).clamp(max=len(self._text.logits) - 1).to(self._text.logits.device)
        ]

    def rewind(self, length: int) -> None:
        self._kept = min(self._fed, length)

    def take_features(self) -> Tensor | None:
        features = self._text.features
        if features is None:
            return None
        return features[torch.arange(self._held, self._fed).clamp(max=len(features) - 1).to(features.device)]


@dataclass(frozen=True, slots=True)
class ByText:
    """A rule that judges drafts by the text they should have become."""

    tokens: list[int]

    def __call__(self, law: Tensor, draft: Draft, noise: Noise, *, start: int) -> tuple[int, int]:
        accepted = agreed(draft.tokens, self.tokens[start:])
        return accepted, self.tokens[min(start + accepted, len(self.tokens) - 1)]


@dataclass(frozen=True, slots=True)
class RecordedDrafter:
    """Proposes what was proposed behind the same prefix of the text. origin: of the context."""

    drafts: Sequence[Draft]
    origin: int

    def begin(self, prompt: list[int], context: list[int]) -> None:
        """Nothing to prepare."""

    def propose(self, context: list[int], count: int) -> Draft:
        told = self.drafts[len(context) - self.origin]
        return Draft(told.tokens[:count], by=told.by)

    def commit(self, context: list[int], verified: Verified) -> None:
        """Nothing to learn."""


def foresee(job: Job, strategies: Sequence[Strategy], tokens: list[int]) -> Foreseen:
    """For each strategy that drafts the rounds of every gamma from 0, and of `auto` (None), had the text been these tokens; with laps
    that tell how many drafts are worked out for them.

    Storages and texts are taken as the job has them, and left so. Raises UserError where a strategy cannot be run.
    """
    heads = isinstance(job.pair.drafter, Grafted) and any(strategy.needs_drafter for strategy in strategies)
    text = read_text(job, tokens, job.pair.drafter.head.shape.layers if heads else ())
    for strategy in strategies:
        # Where drafts are translated, fewer of them may be other ones.
        translated = strategy.needs_drafter and job.pair.drafter_tokenizer is not None
        drafts = [] if translated else proposals(job, strategy, text)
        for gamma in range(AUTO_GAMMA + 1):
            told = _drafter(job, strategy, gamma) if translated else RecordedDrafter(drafts, len(text.context))
            yield strategy, gamma, *_run(job, text, told, gamma)
        yield strategy, None, *_run(job, text, _drafter(job, strategy, None), AUTO_GAMMA)


@torch.no_grad()
def read_text(job: Job, tokens: list[int], features: tuple[int, ...] = ()) -> Text:
    """One pass of the target over the prompt and a finished text. Raises UserError for an unusable prompt."""
    session = ModelSession(job.pair.target, use_cache=False, rewinds=False, features=features)
    context = session.begin(job.prompt)
    logits = session.feed([*context, *tokens[:-1]], keep=len(tokens))
    return Text(list(job.prompt), context, tokens, logits, session.take_features())


def proposals(job: Job, strategy: Strategy, text: Text, most: int = AUTO_GAMMA) -> list[Draft]:
    """What the strategy's drafter proposes behind each prefix of the text, at most `most` drafts each.

    A model's draft depends on the text in front of it alone, so it is asked for one at a time.
    """
    drafter, target, context = _drafter(job, strategy, most), ReadSession(text, job.pair.target), list(text.context)
    one_by_one = type(drafter) is ModelDrafter
    made: list[Draft] = []
    drafter.begin(text.prompt, list(context))
    for token in text.tokens:
        start = len(context)
        draft = drafter.propose(context, 1 if one_by_one else most)
        made.append(Draft(list(draft.tokens), by=draft.by))
        logits = target.feed(context, keep=1)
        context = [*context, token]
        target.rewind(start)
        drafter.commit(context, Verified(start, logits, logits.softmax(-1), target.take_features()))
    return [Draft(tokens) for tokens in chained([draft.tokens for draft in made], most)] if one_by_one else made


def chained(first: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """From the one draft behind each prefix, or none, to rounds: what follows a draft that matched was drafted behind it.

    What would follow one that did not match, or the text's end, is not known, nor needed: it counts as drafted, and cannot stand.
    """
    rounds: list[list[int]] = []
    for place in range(len(first)):
        following = [list(drafts[:1]) for drafts in first[place : place + most]]
        until = following.index([]) if [] in following else None
        known = [token for drafts in following[:until] for token in drafts]
        rounds.append(known if until is not None else known + [NOTHING] * (most - len(known)))
    return rounds


def _drafter(job: Job, strategy: Strategy, gamma: int | None) -> Drafter:
    """A drafter of its own, on copies of what drafters keep."""
    own = replace(
        job,
        storage=deepcopy(job.storage),
        kept=replace(job.kept, texts=deepcopy(job.kept.texts)),
        read=None,
        stopwatch=None,
        notebook=None,
    )
    assert strategy.make is not None
    drafter: Drafter = strategy.make(replace(own, settings=replace(job.settings, gamma=gamma)), RULE)[0]
    return drafter


def _run(job: Job, text: Text, drafter: Drafter, gamma: int) -> tuple[list[Step], list[Lap]]:
    told = job.decoding
    most = (
        told.max_new if text.tokens[-1] in told.end_ids else len(text.tokens)
    )  # as many were asked for, where the text did not end
    decoding = Decoding(GreedyProcessor(), most, told.end_ids, told.noise)  # the laws are not looked at
    target = ReadSession(text, job.pair.target)
    watch = Stopwatch()
    drafts = TimedDrafter(drafter, watch)
    rounds = speculative_steps(text.prompt, drafts, target, decoding, gamma=gamma, rule=ByText(text.tokens))
    told_rounds = [(step, watch.read(0)) for step in rounds]
    return [step for step, _ in told_rounds], [lap for _, lap in told_rounds]
