"""Two samples of texts: the p-value is that of the permutation test, rarely small for equal distributions, and small
for different ones.
"""

from itertools import combinations
from random import Random

import pytest

from utils.metrics import two_samples
from utils.metrics.two_samples import compare_samples


def texts(random: Random, count: int, favourite: float = 0.4) -> list[list[int]]:
    """Texts of six tokens: with this probability token 0, otherwise one of five others."""
    return [[0 if random.random() < favourite else random.randrange(1, 6) for _ in range(6)] for _ in range(count)]


def test_shared_beginnings() -> None:
    first, second = [[1, 2, 3], [1, 2, 4], [1, 5, 6]], [[1, 2, 3], [9, 9, 9]]
    found = compare_samples([(first, second)])
    assert found.shared_within == pytest.approx((2 + 1 + 1) / 3)
    assert found.shared_between == pytest.approx((3 + 0 + 2 + 0 + 1 + 0) / 6)


def test_the_p_value_is_that_of_all_permutations() -> None:
    """Three and three texts have 20 divisions; the discrepancy of each is computed here from its definition."""
    every = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [5, 6, 7], [1, 6, 3], [5, 6, 8]]

    def kernel(one: list[int], other: list[int]) -> float:
        shared = next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 3)
        return shared / 3 + len(set(one) & set(other)) / 3  # all tokens of a text are different

    def discrepancy(first: tuple[int, ...]) -> float:
        second = [index for index in range(6) if index not in first]
        mean = [
            sum(kernel(every[one], every[other]) for one in left for other in right) / 9
            for left, right in ((first, first), (second, second), (first, second))
        ]
        return mean[0] + mean[1] - 2 * mean[2]

    values = [discrepancy(chosen) for chosen in combinations(range(6), 3)]
    exact = sum(value >= values[0] - 1e-9 for value in values) / 20
    assert 0 < exact < 1
    # 4,999 permutations: five standard deviations, so a false alarm has a probability below 1e-6.
    assert compare_samples([(every[:3], every[3:])]).p_value == pytest.approx(exact, abs=5 * 0.5 / 4999**0.5)


def test_equal_distributions_are_rarely_called_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 5 % of p-values are at most 0.05. Of 300, more than 36 are so with a probability below 1e-5."""
    monkeypatch.setattr(two_samples, "PERMUTATIONS", 199)
    random = Random(1)
    found = [
        compare_samples([(texts(random, 8), texts(random, 8)) for _ in range(2)], seed).p_value for seed in range(300)
    ]
    assert sum(value <= 0.05 for value in found) <= 36
    assert sum(value <= 0.5 for value in found) > 100  # nor are they all near 1


@pytest.mark.parametrize("favourite", [0.0, 0.8])
def test_different_distributions_are_found(favourite: float) -> None:
    random = Random(2)
    prompts = [(texts(random, 24), texts(random, 24, favourite)) for _ in range(4)]
    assert compare_samples(prompts).p_value < 0.001


def test_texts_without_a_common_beginning_are_compared_by_their_tokens() -> None:
    first, second = [[10 + place, 1, 1, 2] for place in range(8)], [[20 + place, 3, 3, 4] for place in range(8)]
    found = compare_samples([(first, second)])
    assert found.shared_within == found.shared_between == 0 and found.p_value < 0.001


def test_texts_that_never_change_are_one_distribution() -> None:
    same = [[1, 2]] * 4
    assert compare_samples([(same, same)]).p_value == 1
    assert compare_samples([([[]] * 3, [[]] * 3)]).p_value == 1
    assert compare_samples([(same, [[3, 4]] * 4)]).p_value < 0.05
