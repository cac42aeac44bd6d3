"""Are two sets of texts samples of one distribution? A permutation test of the maximum mean discrepancy (Gretton et al.
2012, "A Kernel Two-Sample Test"), which needs no probabilities.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from utils.metrics.results import first_difference

Text = Sequence[Hashable]  # its tokens, or its words
Matrix = npt.NDArray[np.float64]
PERMUTATIONS = 4999  # so the smallest p-value is 1 / 5000


@dataclass(frozen=True, slots=True)
class TwoSamples:
    """shared_within: how many first tokens two texts of the first sample share on average. shared_between: one of each
    sample. p_value: the probability that samples of one distribution differ at least this much.
    """

    shared_within: float
    shared_between: float
    p_value: float


def compare_samples(prompts: Sequence[tuple[Sequence[Text], Sequence[Text]]], seed: int = 0) -> TwoSamples:
    """Compare two samples of texts for each prompt. Each sample needs at least two texts.

    The kernel is the number of first tokens that two texts share, divided by the longest text's, plus the cosine of
    their counts of tokens. The discrepancies of all prompts are added; texts are permuted within their prompt.
    """
    generator = np.random.default_rng(seed)
    observed, permuted = 0.0, np.zeros(PERMUTATIONS)
    within, between = [], []
    for first, second in prompts:
        texts, count = [*first, *second], len(first)
        shared = _matrix(texts, _shared)
        kernel = shared / max(1, *map(len, texts)) + _matrix(texts, _cosine)
        weights = np.concatenate([np.full(count, 1 / count), np.full(len(second), -1 / len(second))])
        observed += float(weights @ kernel @ weights)
        chosen = generator.permuted(np.tile(weights, (PERMUTATIONS, 1)), axis=1)
        permuted += np.einsum("pi,ij,pj->p", chosen, kernel, chosen, optimize=True)
        within.append(shared[:count, :count][~np.eye(count, dtype=bool)].mean())
        between.append(shared[:count, count:].mean())
    # Without a tolerance, rounding decides between permutations that are equal.
    extreme = int((permuted >= observed - 1e-12).sum())
    return TwoSamples(float(np.mean(within)), float(np.mean(between)), (1 + extreme) / (1 + PERMUTATIONS))


def _matrix(texts: Sequence[Text], kernel: Callable[[Text, Text], float]) -> Matrix:
    return np.array([[kernel(one, other) for other in texts] for one in texts], dtype=np.float64)


def _shared(one: Text, other: Text) -> float:
    """The number of first tokens that are equal."""
    place = first_difference(one, other)
    return float(len(one) if place is None else place)


def _cosine(one: Text, other: Text) -> float:
    """The cosine between the counts of tokens of two texts; 1 if both are empty, 0 if one is."""
    counts, others = Counter(one), Counter(other)
    norms = sum(count**2 for count in counts.values()) * sum(count**2 for count in others.values())
    if not norms:
        return float(len(one) == len(other))
    return sum(count * others[token] for token, count in counts.items()) / sqrt(norms)
