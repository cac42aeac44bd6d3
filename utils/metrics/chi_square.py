"""Goodness of fit: do counted draws follow a law? Pearson's chi-square with the cells that are too small merged, and its p-value."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_CELL = 5.0  # expected counts below this make the chi-square law a poor description


@dataclass(frozen=True, slots=True)
class Fit:
    """draws: how many. matches: how many of them the law allows at all. support: how many tokens it allows. cells: after merging.

    statistic, freedom, p_value: of the chi-square test; None where fewer than two cells are left. p_value is the probability that draws
    from the law itself look at least this far from it.
    """

    draws: int
    matches: int
    support: int
    cells: int
    statistic: float | None
    freedom: int | None
    p_value: float | None


def fit(counts: Mapping[int, int], law: Tensor) -> Fit:
    """Counts by token id against a law (V,). A draw that the law gives no probability makes the p-value 0."""
    draws = sum(counts.values())
    probabilities = law.tolist()
    matches = sum(count for token, count in counts.items() if probabilities[token] > 0)
    support = sum(value > 0 for value in probabilities)
    cells = _merged([(counts.get(token, 0), draws * value) for token, value in enumerate(probabilities) if value > 0])
    if matches < draws:
        return Fit(draws, matches, support, len(cells), None, None, 0.0)
    if len(cells) < 2:
        return Fit(draws, matches, support, len(cells), None, None, None)
    statistic, freedom = sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1
    return Fit(draws, matches, support, len(cells), statistic, freedom, chi_square_tail(statistic, freedom))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The probability that a chi-square variable of `freedom` degrees exceeds `statistic`."""
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _merged(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """(seen, expected) with every cell expected under 5 in one, and that one with the smallest other if it is still too small."""
    large = sorted((cell for cell in cells if cell[1] >= SMALLEST_CELL), key=lambda cell: cell[1], reverse=True)
    small = [cell for cell in cells if cell[1] < SMALLEST_CELL]
    if small:
        rest = (sum(seen for seen, _ in small), sum(expected for _, expected in small))
        if rest[1] < SMALLEST_CELL and large:
            seen, expected = large.pop()
            rest = (rest[0] + seen, rest[1] + expected)
        large.append(rest)
    return large
