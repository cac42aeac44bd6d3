"""Goodness of fit: Pearson's chi-square test of counted draws against a distribution. Small cells are merged."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXPECTED = 5.0  # with smaller expected counts the chi-square distribution is a poor approximation


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of the test.

    `draws` is their number, and `matches` counts those with a probability above 0. `support` is the number of tokens
    with such a probability. `cells` counts the cells after merging. `statistic`, `freedom` and `p_value` are None with
    fewer than two cells. `p_value` is the probability that draws from the distribution itself deviate at least this
    much.
    """

    draws: int
    matches: int
    support: int
    cells: int
    statistic: float | None
    freedom: int | None
    p_value: float | None


def fit(counts: Mapping[int, int], probs: Tensor) -> Fit:
    """Test counts by token id against a distribution (V,). A draw of a token with probability 0 makes the p-value 0."""
    draws = sum(counts.values())
    probabilities = probs.tolist()
    matches = sum(count for token, count in counts.items() if probabilities[token] > 0)
    support = sum(value > 0 for value in probabilities)
    cells = _merged([(counts.get(token, 0), draws * value) for token, value in enumerate(probabilities) if value > 0])
    # First: an impossible draw refutes the distribution, however few cells there are.
    if matches < draws:
        return Fit(draws, matches, support, len(cells), None, None, 0.0)
    if len(cells) < 2:
        return Fit(draws, matches, support, len(cells), None, None, None)
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    freedom = len(cells) - 1
    return Fit(draws, matches, support, len(cells), statistic, freedom, chi_square_tail(statistic, freedom))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The probability that a chi-square variable with `freedom` degrees exceeds `statistic`."""
    # Q(freedom / 2, statistic / 2), the regularised upper incomplete gamma function.
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _merged(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The cells (observed, expected), with those expected below 5 merged into one. If that is still too small, it also
    takes the smallest other cell.
    """
    large = sorted((cell for cell in cells if cell[1] >= MIN_EXPECTED), key=lambda cell: cell[1], reverse=True)
    small = [cell for cell in cells if cell[1] < MIN_EXPECTED]
    if small:
        rest = (sum(observed for observed, _ in small), sum(expected for _, expected in small))
        if rest[1] < MIN_EXPECTED and large:
            observed, expected = large.pop()
            rest = (rest[0] + observed, rest[1] + expected)
        large.append(rest)
    return large
