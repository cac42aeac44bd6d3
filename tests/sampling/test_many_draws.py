"""Large samples: 16 tokens, a drafter that likes best what the target likes least, 200,000 texts; and noise that is reused across rounds.

Cells expected under 5 are merged, the threshold is df + 10 sqrt(2 df) with df at least 15: passed by chance with probability under 1e-8
(at the end, with df 7, under 1e-6).
Rounds run on tables of laws, without sessions: what is in question is the rule and the noise.
"""

from collections import Counter
from functools import cache

import pytest
import torch
from toys import ToyModel, chi_square, joint_probs, opposed, session, statistic_of, toy

from sampling import RULES, Draft, ModelDrafter, Rule, Verified, speculative_steps
from utils.decode.decoding import Decoding
from utils.decode.noise import Domain, Noise
from utils.logits_processor import MultinomialProcessor
from utils.metrics.results import tokens_of

SIZE, START, TRIALS = 16, 0, 200_000
TARGET = toy(21, SIZE, spread=2.0)
P, Q = (torch.softmax(model.table.double(), dim=-1) for model in (TARGET, opposed(TARGET)))


def text(seed: int, rule: Rule, *, gamma: int, length: int) -> tuple[int, ...]:
    """Rounds of up to `gamma` drafts until there are `length` tokens."""
    noise, made = Noise(seed), [START]
    while (start := len(made) - 1) < length:
        drafted: list[int] = []
        for position in range(start, start + min(gamma, length - start - 1)):
            drafted.append(noise.pick(Q[drafted[-1] if drafted else made[-1]], Domain.DRAFT, position, start))
        behind = [made[-1], *drafted]
        draft = Draft(drafted, Q[behind[:-1]]) if drafted else Draft([])
        accepted, token = rule(P[behind], draft, noise, start=start)
        made += [*drafted[:accepted], token]
    return tuple(made[1:])


@cache
def sample(rule: str, gamma: int, length: int, trials: int) -> Counter[tuple[int, ...]]:
    return Counter(text(seed, RULES[rule], gamma=gamma, length=length) for seed in range(trials))


def follows(counts: Counter[tuple[int, ...]], length: int) -> bool:
    """Whether the first `length` tokens follow their joint law."""
    probs = joint_probs(TARGET, MultinomialProcessor(1.0), START, length)
    shortened: Counter[tuple[int, ...]] = Counter()
    for tokens, count in counts.items():
        shortened[tokens[:length]] += count
    statistic, threshold, freedom = statistic_of(shortened, probs)
    assert freedom >= 15
    return statistic < threshold


def follows_given_prefixes(counts: Counter[tuple[int, ...]], length: int) -> bool:
    """Whether the last of `length` tokens follows its law given those before it, for every prefix seen at least 1,000 times."""
    prefixes: dict[tuple[int, ...], Counter[tuple[int, ...]]] = {}
    for tokens, count in counts.items():
        prefixes.setdefault(tokens[: length - 1], Counter())[tokens[length - 1 : length]] += count
    statistic, freedom = 0.0, 0
    for prefix, seen in prefixes.items():
        if sum(seen.values()) >= 1000:
            probs = {(token,): float(P[(START, *prefix)[-1], token]) for token in range(SIZE)}
            part, _, cells = statistic_of(seen, probs)
            statistic, freedom = statistic + part, freedom + cells
    assert freedom >= 15
    return statistic < freedom + 10 * (2 * freedom) ** 0.5


def test_one_draft_jointly_over_both_positions() -> None:
    counts = sample("rejection", 1, 2, TRIALS)
    assert follows(counts, 2) and follows_given_prefixes(counts, 2)


@pytest.mark.parametrize(("rule", "trials"), [("rejection", TRIALS), ("block", TRIALS // 4)])
def test_three_drafts_by_position_and_jointly_over_several_rounds(rule: str, trials: int) -> None:
    counts = sample(rule, 3, 4, trials)
    for length in (1, 2, 3, 4):
        assert follows(counts, length), length
        assert follows_given_prefixes(counts, length), length


@pytest.mark.full
def test_three_drafts_by_block_verification_with_as_many_draws() -> None:
    counts = sample("block", 3, 4, TRIALS)
    for length in (1, 2, 3, 4):
        assert follows(counts, length) and follows_given_prefixes(counts, length), length


class ReusedNoise(Noise):
    """The mutant: noise keyed by position alone, not by the round's start."""

    __slots__ = ()

    def _raw(self, domain: Domain, position: int, start: int, *, count: int):
        return Noise._raw(self, domain, position, 0, count=count)


class Moody(ModelDrafter):
    """It sits out the next round if a draft that was thrown away unseen was token 0."""

    sulks = False

    def propose(self, context: list[int], count: int) -> Draft:
        draft = super().propose(context, 0 if self.sulks else count)
        self._drafted = draft.tokens
        return draft

    def commit(self, context: list[int], verified: Verified) -> None:
        judged = len(context) - verified.start
        self.sulks = 0 in self._drafted[judged:]
        super().commit(context, verified)


EVEN, LEANING = ToyModel(torch.zeros(2, 2)), ToyModel(torch.tensor([[1.5, 0.0], [1.5, 0.0]]))


def statistic(rule: str, kind: type[ModelDrafter], noise: type[Noise]) -> tuple[float, float]:
    """12,000 texts of three tokens of a model of two."""

    def three(seed: int) -> tuple[int, ...]:
        plan = Decoding(MultinomialProcessor(1.0), 3, frozenset(), noise(seed))
        return tuple(
            tokens_of(
                speculative_steps([0], kind(session(LEANING), plan, 2), session(EVEN), plan, gamma=2, rule=RULES[rule])
            )
        )

    return chi_square(three, joint_probs(EVEN, MultinomialProcessor(1.0), 0, 3), 12_000)


@pytest.mark.parametrize("kind", [ModelDrafter, Moody])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rounds_whose_length_depends_on_discarded_drafts_follow_the_law(rule: str, kind: type[ModelDrafter]) -> None:
    seen, threshold = statistic(rule, kind, Noise)
    assert seen < threshold


@pytest.mark.parametrize(("rule", "kind"), [("block", ModelDrafter), ("rejection", Moody)])
def test_noise_reused_across_rounds_is_noticed(rule: str, kind: type[ModelDrafter]) -> None:
    seen, threshold = statistic(rule, kind, ReusedNoise)
    assert seen > threshold
