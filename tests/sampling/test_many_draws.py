"""Several rounds: a position may be drafted again in the next round, so each round needs its own noise.

Runs over several rounds are enumerated path by path (see exact.py), with correct noise and with noise that is reused
across rounds. Texts of a model with 16 tokens are sampled with the program's noise: 500 in `make test`,
200,000 in `make test-full`.
"""

from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from exact import Branching, Reusing, distance, outcome_probs, text_probs
from toys import ToyModel, decoding, joint_probs, opposed, session, statistic_of, toy

from sampling import RULES, Draft, ModelDrafter, Rule, Verified, speculative_steps
from utils.decode.noise import Domain, Noise
from utils.logits_processor import MultinomialProcessor

START, PROCESSOR = 0, MultinomialProcessor(1.0)


@cache
def probabilities(target: ToyModel) -> tuple[torch.Tensor, torch.Tensor]:
    """p of the target and q of a drafter with the reverse ranking, both (V, V) by the last token."""
    return target.table.double().softmax(-1), opposed(target).table.double().softmax(-1)


def text(target: ToyModel, rule: Rule, gamma: int, length: int, noise: Any) -> tuple[int, ...]:
    """Rounds of up to `gamma` drafts, on tables of distributions without sessions, until there are `length` tokens."""
    p, q = probabilities(target)
    made = [START]
    while (start := len(made) - 1) < length:
        drafted: list[int] = []
        for position in range(start, start + min(gamma, length - start - 1)):
            drafted.append(noise.pick(q[drafted[-1] if drafted else made[-1]], Domain.DRAFT, position, start))
        before = [made[-1], *drafted]
        draft = Draft(drafted, q[before[:-1]]) if drafted else Draft([])
        accepted, token = rule(p[before], draft, noise, start=start)
        made += [*drafted[:accepted], token]
    return tuple(made[1:])


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    ("size", "gamma", "length"),
    [(2, 3, 4), (2, 2, 5), (4, 1, 3)] + [pytest.param(*row, marks=pytest.mark.full) for row in ((3, 3, 4), (2, 2, 6))],
)
def test_several_rounds_are_exact(rule: str, size: int, gamma: int, length: int) -> None:
    target = toy(21, size)
    texts = outcome_probs(partial(text, target, RULES[rule], gamma, length))
    assert distance(texts, joint_probs(target, PROCESSOR, START, length)) < 1e-12


class Skipping(ModelDrafter):
    """A drafter that skips the next round if token 0 was among the discarded drafts."""

    skips = False

    def propose(self, context: list[int], count: int) -> Draft:
        draft = super().propose(context, 0 if self.skips else count)
        self._drafted = draft.tokens
        return draft

    def commit(self, context: list[int], verified: Verified) -> None:
        new = len(context) - verified.start
        self.skips = 0 in self._drafted[new:]
        super().commit(context, verified)


class PositionOnly(Reusing):
    """A mistake: noise with keys that do not contain the start of the round."""

    def split(self, key: tuple[int, ...], weights: Any) -> int:
        return super().split((*key[:2], 0), weights)


UNIFORM, BIASED = ToyModel(torch.zeros(2, 2)), ToyModel(torch.tensor([[1.5, 0.0], [1.5, 0.0]]))


def error(rule: str, kind: type[ModelDrafter], noise: type[Branching]) -> float:
    """Total variation distance of three tokens from the target's joint distribution."""

    def run(branching: Any) -> Any:
        plan = decoding(3, noise=branching)
        return speculative_steps([0], kind(session(BIASED), plan, 2), session(UNIFORM), plan, gamma=2, rule=RULES[rule])

    return distance(text_probs(run, noise), joint_probs(UNIFORM, PROCESSOR, 0, 3))


@pytest.mark.parametrize("kind", [ModelDrafter, Skipping])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_number_of_drafts_may_depend_on_discarded_drafts(rule: str, kind: type[ModelDrafter]) -> None:
    assert error(rule, kind, Branching) < 1e-12


@pytest.mark.parametrize(("rule", "kind"), [("block", ModelDrafter), ("rejection", Skipping)])
def test_noise_reused_across_rounds_is_detected(rule: str, kind: type[ModelDrafter]) -> None:
    assert error(rule, kind, PositionOnly) > 0.01


# With the program's own noise.

SIZE, MORE, FEW = 16, 200_000, 500
TARGET = toy(21, SIZE, spread=2.0)


@cache
def sample(rule: str, gamma: int, length: int, trials: int) -> Counter[tuple[int, ...]]:
    return Counter(text(TARGET, RULES[rule], gamma, length, Noise(seed)) for seed in range(trials))


def follows(counts: Counter[tuple[int, ...]], length: int) -> bool:
    """Whether the first `length` tokens follow their joint distribution."""
    shortened: Counter[tuple[int, ...]] = Counter()
    for tokens, count in counts.items():
        shortened[tokens[:length]] += count
    statistic, threshold, freedom = statistic_of(shortened, joint_probs(TARGET, PROCESSOR, START, length))
    assert freedom >= 7
    return statistic < threshold


def follows_given_prefixes(counts: Counter[tuple[int, ...]], length: int) -> bool:
    """Whether the last of `length` tokens follows its distribution after each prefix of at least 1/200 of the texts."""
    prefixes: dict[tuple[int, ...], Counter[tuple[int, ...]]] = {}
    for tokens, count in counts.items():
        prefixes.setdefault(tokens[: length - 1], Counter())[tokens[length - 1 : length]] += count
    statistic, freedom, p = 0.0, 0, probabilities(TARGET)[0]
    for prefix, followers in prefixes.items():
        if sum(followers.values()) >= sum(counts.values()) / 200:
            expected = {(token,): float(p[(START, *prefix)[-1], token]) for token in range(SIZE)}
            part, _, cells = statistic_of(followers, expected)
            statistic, freedom = statistic + part, freedom + cells
    assert freedom >= 7
    return statistic < freedom + 10 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("rule", "gamma", "length", "trials"),
    [
        ("rejection", 3, 4, FEW),
        *(
            pytest.param(*rule, MORE, marks=pytest.mark.full)
            for rule in (("rejection", 1, 2), ("rejection", 3, 4), ("block", 3, 4))
        ),
    ],
)
def test_samples_follow_the_distribution_by_position_and_jointly(
    rule: str, gamma: int, length: int, trials: int
) -> None:
    """Two chi-square tests per length. The probability of a false alarm is below 1e-5 for all of them together.

    Cells with an expected count below 5 are merged, and the threshold is df + 10 sqrt(2 df).
    """
    counts = sample(rule, gamma, length, trials)
    for end in range(1, length + 1):
        assert follows(counts, end) and follows_given_prefixes(counts, end), end
