"""Toy models whose law is known exactly, and the statistics that compare samples with it.

A ToyModel's law of the next token depends on the last token alone, so the joint law of a few tokens is a product of table rows. It is
called like any causal model, without a cache.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from utils.decode.decoding import Decoding
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.logits_processor import LogitsProcessor, MultinomialProcessor

PATH = [0, 7, 3, 9, 4, 8, 2, 6, 1, 5]  # a text for `chain`


class ToyConfig(SimpleNamespace):
    """The few attributes that sessions read."""

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
    """A random law over `size` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return ToyModel(torch.randn(size, size, generator=generator) * spread)


def opposed(model: ToyModel) -> ToyModel:
    """A drafter that likes best what the target likes least: forced rejections."""
    return ToyModel(-model.table)


def chain(tokens: Iterable[int], size: int) -> ToyModel:
    """A model that surely says `tokens` one after the other (each id at most once before the last)."""
    table = torch.zeros(size, size)
    path = list(tokens)
    for before, after in pairwise(path):
        table[before, after] = 50.0
    return ToyModel(table)


def session(model: nn.Module, **options: bool) -> ModelSession:
    return ModelSession(model, **{"use_cache": False, **options})


def decoding(
    max_new: int, *, processor: LogitsProcessor | None = None, seed: int = 0, ends: Iterable[int] = ()
) -> Decoding:
    return Decoding(processor or MultinomialProcessor(1.0), max_new, frozenset(ends), Noise(seed))


def joint_law(model: ToyModel, processor: LogitsProcessor, start: int, length: int) -> dict[tuple[int, ...], float]:
    """The exact probability of every sequence of `length` tokens behind the token `start`."""
    rows = processor(model.table)
    law = {}
    for tokens in product(range(model.table.shape[-1]), repeat=length):
        probability, last = 1.0, start
        for token in tokens:
            probability *= float(rows[last, token])
            last = token
        law[tokens] = probability
    return law


def chi_square(
    sample: Callable[[int], tuple[int, ...]], law: dict[tuple[int, ...], float], trials: int
) -> tuple[float, float]:
    """(statistic, threshold) of `trials` samples, one per seed, against a law.

    Cells expected under 5 are merged. The threshold df + 10 sqrt(2 df) is passed by chance with probability under 1e-8 for df >= 15,
    and under 1e-5 for df >= 3.
    """
    statistic, threshold, freedom = statistic_of(Counter(sample(seed) for seed in range(trials)), law)
    assert freedom >= 3, "too few cells to say anything"
    return statistic, threshold


def statistic_of(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> tuple[float, float, int]:
    """(statistic, threshold, degrees of freedom) of counts against a law."""
    assert all(law.get(tokens, 0.0) > 0 for tokens in counts), "a sequence of probability 0 was produced"
    trials = sum(counts.values())
    cells = [(counts[tokens], trials * probability) for tokens, probability in law.items() if probability > 0]
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
