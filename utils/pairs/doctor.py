"""The convention doctor: does a drafter that reads hidden states read those that it was trained on?

The commonest mistake with published drafters is silent: layer ids off by one or the wrong side of a norm. The text
stays right, and hardly any draft is accepted. So the plausible readings of a checkpoint are compared by how often they
predict the target's own text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import comb

import torch
from torch import Tensor

from sampling.autoregressive import autoregressive_steps
from sampling.drafters.feature_sessions import feature_session
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.metrics.results import tokens_of
from utils.models.feature_drafter import Conventions, FeatureDrafter, StepwiseDrafter

TEXT_TOKENS = 256  # of the target's own text
DEPTH = 3  # drafts in a row: the first one depends on the features, further ones on what is fed back
MOVED = 17  # positions by which features are displaced to see whether the drafter uses them
SIGNIFICANCE = 0.001  # of a difference between two readings, divided by their number


@dataclass(frozen=True, slots=True)
class Reading:
    """How often one reading of a checkpoint predicted the target's text.

    name: empty for the present one. hits: (positions, DEPTH) of 0 or 1; a place counts whether or not those before it
    were right, because the text itself is fed.
    """

    name: str
    conventions: Conventions
    hits: Tensor

    @property
    def agreement(self) -> tuple[float, ...]:
        """The share of positions at which each draft in a row was right."""
        return tuple(self.hits.float().mean(0).tolist())


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """readings: the present one first. better: a reading that is significantly better. reads_target: whether the
    features matter: with displaced ones the drafter agrees significantly less.
    """

    readings: tuple[Reading, ...]
    better: Reading | None
    reads_target: bool

    @property
    def positions(self) -> int:
        """The number of positions that were compared."""
        return len(self.readings[0].hits)


def own_text(target: object, prompt: list[int], count: int = TEXT_TOKENS) -> list[int]:
    """The prompt and the target's greedy answer, which does not end at end tokens."""
    decoding = Decoding.of(None, count, end_ids=None, seed=0)
    return [*prompt, *tokens_of(autoregressive_steps(prompt, ModelSession(target, rewinds=False), decoding))]


def examine(drafter: FeatureDrafter, target: object, text: list[int], start: int) -> Diagnosis:
    """Compare the readings of a checkpoint on the target's own text, from position `start` on.

    The drafter's conventions are as before afterwards; `better` is for the caller to apply.
    """
    candidates = {"": drafter.conventions, **drafter.readings()}
    layers = tuple(dict.fromkeys(layer for each in candidates.values() for layer in each.feature_layers))
    states = _hidden_states(target, text, layers)
    rounds = range(max(1, start - 2), len(text) - DEPTH - 1)
    readings = []
    for name, conventions in candidates.items():
        features = torch.cat([states[layer] for layer in conventions.feature_layers], dim=-1)
        with _reading(drafter, conventions):
            readings.append(Reading(name, conventions, _hits(drafter, features, text, rounds)))
            if not name:
                moved = Reading("", conventions, _hits(drafter, features.roll(MOVED, 0), text, rounds))
    own, others = readings[0], readings[1:]
    better = max(others, key=lambda other: other.hits.sum().item(), default=None)
    if better is not None and not _is_better(better, own, SIGNIFICANCE / len(others)):
        better = None
    judged = own if better is None else better
    return Diagnosis(tuple(readings), better, _is_better(judged, moved, SIGNIFICANCE))


def _hidden_states(target: object, text: list[int], layers: tuple[int, ...]) -> dict[int, Tensor]:
    session = ModelSession(target, rewinds=False, features=layers)
    session.begin(text)
    session.feed(text, keep=1)
    features = session.take_features()
    assert features is not None
    return dict(zip(layers, features.chunk(len(layers), dim=-1), strict=True))


@contextmanager
def _reading(drafter: FeatureDrafter, conventions: Conventions) -> Iterator[None]:
    before = drafter.conventions
    drafter.conventions = conventions
    try:
        yield
    finally:
        drafter.conventions = before


def _hits(drafter: FeatureDrafter, features: Tensor, text: list[int], rounds: range) -> Tensor:
    """Which of DEPTH drafts in a row are the text's tokens (rounds, DEPTH). Round i knows the features up to i."""
    session = feature_session(drafter)
    session.begin(text)
    depth = DEPTH if isinstance(drafter, StepwiseDrafter) else min(DEPTH, session.block_size)
    known, hits = 0, []
    for last in rounds:
        session.add_features(features[known : last + 1], known, last + 1)
        known = last + 1
        # The text is fed instead of the drafts, so that every position counts.
        rows = [session.feed(text[: known + 1 + step], keep=1)[0].argmax() for step in range(depth)]
        hits.append([int(row) == text[known + 1 + step] for step, row in enumerate(rows)])
        session.rewind(known)
    return torch.tensor(hits, dtype=torch.int64)


def _is_better(one: Reading, other: Reading, level: float) -> bool:
    """Whether a reading is right significantly more often, by McNemar's exact test.

    A position is won by the reading with more hits in a row: the drafts after it are not independent of each other.
    """
    difference = one.hits.sum(1) - other.hits.sum(1)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return wins > losses and sign_test(wins, losses) <= level


def sign_test(wins: int, losses: int) -> float:
    """The probability of so many wins or more, of wins + losses, if both were equally likely."""
    count = wins + losses
    return float(Fraction(sum(comb(count, more) for more in range(wins, count + 1)), 2**count))
