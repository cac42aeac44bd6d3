"""The chi-square test, logits by verify width, their drift, and sessions that fork."""

from collections import Counter
from typing import Any

import pytest
import torch
from tiny import tiny_llama, tiny_sliding, tiny_t5

from utils.commands.checks import chi_square_tail, fit
from utils.decode.logit_drift import LogitDrift, logits_by_width, max_rounding
from utils.decode.model_session import ModelSession

PROMPT = [5, 9, 13, 9, 5, 9, 13, 2]


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"), [(3.841459, 1, 0.05), (11.070498, 5, 0.05), (37.6973, 15, 0.001), (0, 3, 1)]
)
def test_tails_of_the_chi_square_distribution(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-4)


def test_small_cells_are_merged() -> None:
    probs = torch.tensor([0.5, 0.3, 0.1, 0.04, 0.03, 0.03, 0.0])
    result = fit({0: 50, 1: 30, 2: 10, 3: 4, 4: 3, 5: 3}, probs)
    assert (result.draws, result.matches, result.cells) == (100, 100, 4) and result.p_value == pytest.approx(1)
    result = fit({0: 20, 1: 12, 2: 8}, probs[[0, 1, 2]] / 0.9)
    assert result.cells == 2  # 4.4 is too small, and is merged with the smallest other cell
    assert fit({6: 1, 0: 99}, probs).p_value == 0.0 and fit({6: 1, 0: 99}, probs).matches == 99
    assert fit({0: 9}, torch.tensor([1.0, 0.0])).p_value is None
    assert fit({0: 2}, probs).cells == 1


def test_p_values_of_correct_draws_are_uniform() -> None:
    """1,000 tests of 200 draws: the share of p-values below 0.1 lies within 5 sigma of 0.1."""
    probs = torch.softmax(torch.randn(12, generator=torch.Generator().manual_seed(0)).double(), 0)
    draws = torch.multinomial(
        probs.expand(1000, -1), 200, replacement=True, generator=torch.Generator().manual_seed(1)
    ).tolist()
    low = sum(fit(Counter(row), probs).p_value < 0.1 for row in draws)
    assert abs(low - 100) < 5 * (1000 * 0.1 * 0.9) ** 0.5


@pytest.mark.parametrize("build", [tiny_llama, tiny_sliding, tiny_t5])
def test_a_fork_is_independent(build: Any) -> None:
    model = build(seed=0)
    prompt = [1 + token % 60 for token in range(20)]
    base = ModelSession(model, rewinds=False)
    context = base.begin(prompt) + [3, 4, 5]
    base.feed(context[:-2], keep=1)
    twin = base.fork()
    other = twin.feed([*context[:-2], 7, 8, 9], keep=1)
    fresh = ModelSession(model, rewinds=False)
    fresh.begin(prompt)
    torch.testing.assert_close(base.feed(context, keep=2), fresh.feed(context, keep=2), atol=1e-4, rtol=1e-4)
    again = ModelSession(model, rewinds=False)
    again.begin(prompt)
    torch.testing.assert_close(other, again.feed([*context[:-2], 7, 8, 9], keep=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build", [tiny_llama, tiny_sliding, tiny_t5])
def test_logits_by_width_equal_those_of_one_forward_pass(build: Any) -> None:
    model = build(seed=0).double()
    session = ModelSession(model)
    context = [*session.begin(PROMPT), *range(1, 24)]
    session.feed(context[:-7], keep=1)
    whole = logits_by_width(session, context, 7, 7)
    assert whole.shape == (7, 64)
    for width in (1, 2, 3, 5, 9):
        torch.testing.assert_close(logits_by_width(session, context, 7, width), whole)


def test_drift_is_the_largest_difference_and_the_number_of_flips() -> None:
    first = torch.tensor([[1.0, 2.0, 0.0], [5.0, 1.0, 0.0]])
    second = torch.tensor([[1.0, 2.25, 0.0], [5.0, 1.0, 5.5]])
    drift = LogitDrift.of([first, second, first])
    assert drift == LogitDrift(5.5, 1, 2)
    assert drift + LogitDrift(0.5, 2, 4) == LogitDrift(5.5, 3, 6)
    assert max_rounding(first) < 0.01 < max_rounding(first.bfloat16())
    hidden = torch.tensor([[0.0, float("-inf")]])
    assert LogitDrift.of([hidden, hidden]).difference == 0.0 and max_rounding(hidden + 1) < 1
