"""Jobs for strategies, with tiny pairs whose drafts are sometimes accepted."""

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from tiny import tiny_head, tiny_llama, tiny_t5

from ngram_assisted import NGramStorage
from utils.commands.experiments.speed_model import GammaRounds, replayed_rounds
from utils.comparison.strategies import STRATEGIES, Job, Strategy
from utils.config.settings import Settings

PROMPT = [5, 9, 13, 9, 5, 9, 13, 2, 40, 5, 9]


@cache
def pair(kind: str) -> Any:
    """A target with a drafter that is sometimes accepted: a copy with noise on the weights, or a head."""
    build = tiny_t5 if kind == "t5" else tiny_llama
    target, drafter = build(vocab_size=64), build(vocab_size=64)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * weight.std(correction=0) * 0.05
            )
    made = SimpleNamespace(
        target=target,
        drafter=drafter,
        drafter_kind="model",
        drafter_tokenizer=None,
        end_ids=frozenset({7}),
        feature_layers=(),
    )
    if kind == "head":
        made.drafter, made.drafter_kind = tiny_head(target), "head"
        made.feature_layers = made.drafter.feature_layers
    return made


def strategy_of(word: str, pair: Any) -> Strategy:
    name, words = ("ngram", ("loaded",)) if word == "ngram" else ("speculative", (word,))
    return next(row for row in STRATEGIES if row.name == name).variants(words, pair)[0]


def fresh(kind: str, settings: Settings) -> Job:
    return Job(PROMPT, pair(kind), settings, NGramStorage(3, 64))


def replay_gammas(job: Job, strategies: Sequence[Strategy], tokens: list[int]) -> list[GammaRounds]:
    """The rounds of every gamma on a finished text."""
    return list(replayed_rounds(job, strategies, tokens, lambda text: None))
