"""Toy models whose distribution is known exactly, and the statistics that compare samples with it.

A ToyModel's next token depends on the last token alone, so the joint distribution of a few tokens is a product of table
rows. It is called like any causal model, without a cache.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sampling import AdaptiveGamma
from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.logits_processor import LogitsProcessor, MultinomialProcessor
from utils.metrics.costs import Costs

PATH = [0, 7, 3, 9, 4, 8, 2, 6, 1, 5]  # tokens for `chain`


class ToyConfig(SimpleNamespace):
    """The config attributes that sessions read."""

    def get_text_config(self, decoder: bool = False) -> "ToyConfig":
        return self


class ToyModel(nn.Module):
    """Logits of position i are row `ids[i]` of a table (V, V)."""

    def __init__(self, table: Tensor, context: int = 1000) -> None:
        super().__init__()
        self.table = table
        self.device = torch.device("cpu")
        self.config = ToyConfig(
            vocab_size=table.shape[-1], max_position_embeddings=context, is_encoder_decoder=False, _name_or_path="toy"
        )
        self.calls: list[int] = []

    def forward(
        self, input_ids: Tensor, use_cache: bool = False, return_dict: bool = True, logits_to_keep: int = 0
    ) -> SimpleNamespace:
        self.calls.append(input_ids.shape[-1])
        return SimpleNamespace(logits=self.table[input_ids[:, -logits_to_keep:]])


def toy(seed: int, size: int = 4, spread: float = 1.5) -> ToyModel:
    """A random distribution over `size` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return ToyModel(torch.randn(size, size, generator=generator) * spread)


def opposed(model: ToyModel) -> ToyModel:
    """A drafter that ranks all tokens in the reverse order of the target, so that most drafts are rejected."""
    return ToyModel(-model.table)


def chain(tokens: Iterable[int], size: int) -> ToyModel:
    """A model that generates `tokens` with certainty. Each id may occur only once before the last."""
    table = torch.zeros(size, size)
    path = list(tokens)
    for before, after in pairwise(path):
        table[before, after] = 50.0
    return ToyModel(table)


def session(model: nn.Module, **options: bool) -> ModelSession:
    return ModelSession(model, **{"use_cache": False, **options})


def decoding(
    max_new: int,
    *,
    processor: LogitsProcessor | None = None,
    seed: int = 0,
    ends: Iterable[int] = (),
    noise: Any = None,
) -> Decoding:
    return Decoding(processor or MultinomialProcessor(1.0), max_new, frozenset(ends), noise or Noise(seed))


def drafting_gamma(costs: Costs, draft_cost: float, **options: Any) -> AdaptiveGamma:
    """An adaptive gamma for drafts of this cost."""
    return AdaptiveGamma(replace(costs, draft=(("toy", draft_cost),)), kind="toy", **options)


def joint_probs(model: ToyModel, processor: LogitsProcessor, start: int, length: int) -> dict[tuple[int, ...], float]:
    """The exact probability of every sequence of `length` tokens after the token `start`."""
    rows = processor(model.table).tolist()
    texts = {(start,): 1.0}
    for _ in range(length):
        texts = {
            (*text, token): mass * weight for text, mass in texts.items() for token, weight in enumerate(rows[text[-1]])
        }
    return {text[1:]: mass for text, mass in texts.items()}


def chi_square(
    sample: Callable[[int], tuple[int, ...]], probs: dict[tuple[int, ...], float], trials: int
) -> tuple[float, float]:
    """(statistic, threshold) of `trials` samples, one per seed, against a distribution.

    Cells with an expected count below 5 are merged. Correct samples exceed the threshold df + 10 sqrt(2 df) with
    probability below 1e-8 for df >= 15, and below 1e-5 for df >= 3.
    """
    statistic, threshold, freedom = statistic_of(Counter(sample(seed) for seed in range(trials)), probs)
    assert freedom >= 3, "too few cells for a test"
    return statistic, threshold


def statistic_of(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> tuple[float, float, int]:
    """(statistic, threshold, degrees of freedom) of counts against a distribution."""
    assert all(probs.get(tokens, 0.0) > 0 for tokens in counts), "a sequence of probability 0 was generated"
    trials = sum(counts.values())
    cells = [(counts[tokens], trials * probability) for tokens, probability in probs.items() if probability > 0]
    large = [cell for cell in cells if cell[1] >= 5]
    small = [cell for cell in cells if cell[1] < 5]
    if small:
        large.append((sum(seen for seen, _ in small), sum(expected for _, expected in small)))
    freedom = len(large) - 1
    return (
        sum((seen - expected) ** 2 / expected for seen, expected in large),
        freedom + 10 * (2 * freedom) ** 0.5,
        freedom,
    )
