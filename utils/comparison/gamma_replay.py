"""The rounds of every gamma on a finished text, for each strategy that drafts: what /whatif predicts speeds from."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch

from sampling import RULES
from sampling.counterfactual import (
    FinishedText,
    RecordedDrafter,
    TextNoise,
    chain_single_drafts,
    drafts_along,
    expected_counts,
    replay,
)
from utils.bounds import AUTO_GAMMA
from utils.comparison.job import Job
from utils.comparison.strategies import Strategy
from utils.decode.drafts import Draft
from utils.decode.model_session import ModelSession
from utils.decode.steps import Step
from utils.logits_processor import MultinomialProcessor
from utils.metrics.draft_causes import Counts
from utils.metrics.stopwatch import RoundTiming
from utils.pairs.drafter_kinds import BuiltDrafter, Replay, drafter_kind
from utils.pairs.request import LOADED

# Its noise is keyed by position alone, so a draft does not depend on where its round began.
RULE = RULES["coupled"]


class GammaRounds(NamedTuple):
    """The rounds of one strategy with one gamma; None is adaptive. `timings` have numbers of drafts, but no times."""

    strategy: Strategy
    gamma: int | None
    steps: list[Step]
    timings: list[RoundTiming]


class ReplayProgress(NamedTuple):
    """How much of the work for one strategy is done, from 0 to 1."""

    strategy: Strategy
    fraction: float


def replay_events(
    job: Job, strategies: Sequence[Strategy], tokens: list[int]
) -> Iterator[GammaRounds | ReplayProgress]:
    """The rounds of each strategy for gamma 0, 1, ... and for adaptive gamma, if the text were `tokens`, with progress
    in between.

    All strategies must draft. The job's storages and texts are used, but not changed. Raises UserError if a strategy
    cannot be run.
    """
    needs_features = any(strategy.needs_drafter for strategy in strategies)
    text = read_text(job, tokens, job.pair.feature_layers if needs_features else ())
    for strategy in strategies:
        # A smaller gamma gets the first drafts of the longest round, so one recording serves all, except for NEVER.
        longest = _build(job, strategy, AUTO_GAMMA)
        drafts: list[Draft] = []
        if longest.replay is not Replay.NEVER:
            at_once = AUTO_GAMMA if longest.replay is Replay.BY_ROUND else 1
            for draft in drafts_along(text, longest.drafter, at_once):
                drafts.append(draft)
                yield ReplayProgress(strategy, len(drafts) / (len(tokens) + AUTO_GAMMA))
        recorded = RecordedDrafter(_rounds(drafts, longest), len(text.context)) if drafts else None
        for gamma in range(AUTO_GAMMA + 1):
            drafter = recorded or _build(job, strategy, gamma).drafter
            yield GammaRounds(strategy, gamma, *replay(text, drafter, job.decoding, gamma=gamma))
            if not recorded:
                yield ReplayProgress(strategy, (gamma + 1) / (AUTO_GAMMA + 2))
        adaptive = _build(job, strategy, None).drafter
        yield GammaRounds(strategy, None, *replay(text, adaptive, job.decoding, gamma=AUTO_GAMMA))


@torch.no_grad()
def read_text(job: Job, tokens: list[int], features: tuple[int, ...] = ()) -> FinishedText:
    """Run the target once over the prompt and a finished text. Raises UserError for an unusable prompt."""
    session = ModelSession(job.pair.target, use_cache=False, rewinds=False, features=features)
    context = session.begin(job.prompt)
    logits = session.feed([*context, *tokens[:-1]], keep=len(tokens))  # (T, V); nothing follows the last token
    return FinishedText(
        list(job.prompt), context, tokens, logits, session.take_features(), session.name, session.context_length
    )


def expected_drafts(job: Job, text: FinishedText, temperature: float, count: int) -> tuple[Counts, Counts]:
    """The expected counts of the loaded drafter, with `count` drafts a round, if others have generated the text: for
    drafts drawn from its distribution, and for its likeliest tokens.
    """
    inputs = replace(job, settings=replace(job.settings, gamma=count)).drafter_inputs(shares_noise=False)
    noise, processor = TextNoise(0, tokens=tuple(text.tokens)), MultinomialProcessor(temperature or 1.0)
    forced = replace(inputs, decoding=replace(inputs.decoding, noise=noise, processor=processor))
    built = drafter_kind(LOADED).build(forced)
    return expected_counts(text, built.drafter, temperature, count)


def _rounds(drafts: Sequence[Draft], built: BuiltDrafter) -> Sequence[Draft]:
    """The recorded drafts as rounds."""
    if built.replay is Replay.BY_ROUND:
        return drafts
    return [Draft(tokens) for tokens in chain_single_drafts([draft.tokens for draft in drafts], AUTO_GAMMA)]


def _build(job: Job, strategy: Strategy, gamma: int | None) -> BuiltDrafter:
    """A separate drafter that works on copies of the storage and of earlier texts."""
    caches = replace(job.caches, texts=deepcopy(job.caches.texts))
    settings = replace(job.settings, gamma=gamma)
    own = replace(job, storage=deepcopy(job.storage), caches=caches, prefills=None, settings=settings)
    return strategy.build_drafter(replace(own, stopwatch=None, tracer=None), RULE)
