"""The verification rules by exact enumeration: their tokens follow the target's distribution as equal fractions.

Every outcome of every draw of a round is visited, for distributions on a grid and for random ones that depend on the
whole context. After the round autoregressive decoding continues, and the joint distribution of gamma + 1 tokens must be
that of p. Each round has its own noise (see test_noise.py), so one round is enough. Known mistakes fail these tests.
"""

from fractions import Fraction
from functools import partial
from itertools import product
from random import Random

import pytest
from exact import (
    Branching,
    Distribution,
    Exact,
    Row,
    Verify,
    completed,
    contextual,
    grid,
    joint,
    mean_accepted,
    one_hot_round,
    one_round,
    outcome_probs,
)

from sampling import RULES, choose_rule
from sampling.verification import verify_rejection
from utils.decode.drafts import Draft
from utils.decode.noise import Domain

REJECTION, BLOCK = RULES["rejection"], RULES["block"]


def constant(row: Row) -> Distribution:
    return lambda text: row


def is_exact(p: Distribution, q: Distribution, gamma: int, verify: Verify) -> bool:
    rounds = outcome_probs(partial(one_round, p, q, gamma, verify))
    return completed(rounds, p, gamma + 1) == joint(p, gamma + 1)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("size", "steps"),
    [(2, 12), (3, 4), (4, 3), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((3, 6), (4, 4)))],
)
def test_one_draft_is_exact_for_every_pair_of_distributions(rule: Verify, size: int, steps: int) -> None:
    for p, q in product(grid(size, steps), repeat=2):
        assert is_exact(constant(p), constant(q), 1, rule), (p, q)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("size", "steps", "gamma"),
    [(2, 8, 2), (3, 3, 3), (4, 2, 3)]
    + [pytest.param(*row, marks=pytest.mark.full) for row in ((3, 4, 2), (4, 2, 2), (2, 6, 3))],
)
def test_several_drafts_are_exact_for_distributions_on_a_grid(rule: Verify, size: int, steps: int, gamma: int) -> None:
    for p, q in product(grid(size, steps), repeat=2):
        assert is_exact(constant(p), constant(q), gamma, rule), (p, q)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize(("gamma", "pairs"), [(2, 30), (3, 12)])
def test_several_drafts_are_exact_for_distributions_that_depend_on_the_context(
    rule: Verify, gamma: int, pairs: int
) -> None:
    """Random pairs of distributions over two to four tokens."""
    for seed in range(pairs):
        size = 2 + seed % 3
        assert is_exact(contextual(seed, size), contextual(seed + 1000, size), gamma, rule), seed


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize(("gamma", "pairs"), [(2, 30), (3, 12)])
def test_stopping_by_earlier_drafts_is_exact(rule: Verify, gamma: int, pairs: int) -> None:
    """Whether there is one more draft may depend on all earlier ones, but not on the token that would be drawn."""
    lengths: set[int] = set()
    for seed in range(pairs):
        size, p, q = 2 + seed % 3, contextual(seed, 2 + seed % 3), contextual(seed + 1000, 2 + seed % 3)
        source = Random(seed)
        where = {text: source.random() < 0.4 for length in range(gamma) for text in product(range(size), repeat=length)}
        rounds = outcome_probs(partial(one_round, p, q, gamma, rule, stops=where.__getitem__))
        assert completed(rounds, p, gamma + 1) == joint(p, gamma + 1), seed
        lengths.update(map(len, rounds))
    assert lengths == {*range(1, gamma + 2)}


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_one_hot_drafts_are_exact_for_every_draft(rule: Verify, gamma: int) -> None:
    for size, steps in ((2, 4), (3, 3), (4, 2)):
        for row in grid(size, steps):
            for drafted in product(range(size), repeat=gamma):
                p = constant(row)
                assert completed(outcome_probs(partial(one_hot_round, p, drafted, rule)), p, gamma + 1) == joint(
                    p, gamma + 1
                )
    for seed in range(4):
        p = contextual(seed, 3)
        for drafted in product(range(3), repeat=gamma):
            assert completed(outcome_probs(partial(one_hot_round, p, drafted, rule)), p, gamma + 1) == joint(
                p, gamma + 1
            )


def test_block_verification_accepts_at_least_as_much_as_rejection() -> None:
    gains = 0
    for seed in range(30):
        p, q, gamma = contextual(seed, 3), contextual(seed + 500, 3), 2 + seed % 2
        rejection, block = (
            mean_accepted(outcome_probs(partial(one_round, p, q, gamma, rule))) for rule in (REJECTION, BLOCK)
        )
        assert block >= rejection, seed
        gains += block > rejection
    assert gains > 15


def test_block_verification_of_one_draft_equals_rejection() -> None:
    for p, q in product(grid(3, 3), repeat=2):
        outcomes = [outcome_probs(partial(one_round, constant(p), constant(q), 1, rule)) for rule in (REJECTION, BLOCK)]
        assert outcomes[0] == outcomes[1]


def test_rejection_accepts_the_overlap_of_the_distributions() -> None:
    """alpha = sum min(p, q) (Leviathan et al. 2023, theorem 3.5); two drafts of constant p and q: alpha + alpha^2."""
    for p, q in product(grid(3, 3), repeat=2):
        alpha = sum(map(min, p, q), Fraction(0))
        rounds = [outcome_probs(partial(one_round, constant(p), constant(q), gamma, REJECTION)) for gamma in (1, 2)]
        assert [mean_accepted(outcomes) for outcomes in rounds] == [alpha, alpha + alpha**2]


def corrected_from_p(probs: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    return choose_rule("rejection", adjust=False)(probs, draft, noise, start=start)


def bonus_from_q(probs: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    probs.values[-1] = draft.probs.values[-1]
    return verify_rejection(probs, draft, noise, start=start)


def draws_twice(probs: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    """Sample, compare, and on a mismatch sample again: a draft is emitted with probability p (2 - p)."""
    for index, wanted in enumerate(draft.tokens):
        if noise.sample(probs[index], start + index) != wanted:
            return index, noise.pick(probs[index], Domain.RESIDUAL, start + index, start)
    return len(draft.tokens), noise.sample(probs[-1], start + len(draft.tokens))


def drops_unlikely_drafts(probs: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    """Drops drafts from the first token on that the drafter finds unlikely, after that token was drawn."""
    for index, token in enumerate(draft.tokens):
        if draft.probs.values[index][token] < Fraction(1, 3):
            kept = Draft(draft.tokens[:index], draft.probs[slice(0, index)])
            return verify_rejection(probs[slice(0, index + 1)], kept, noise, start=start)
    return verify_rejection(probs, draft, noise, start=start)


def raw_q(probs: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    """Drafts drawn from the processed distribution, verified with an unprocessed one."""
    flat = [tuple((value + Fraction(1, len(row))) / 2 for value in row) for row in draft.probs.values]
    return verify_rejection(probs, Draft(draft.tokens, Exact(flat)), noise, start=start)


def block_residual_without_r(probs: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    """The number of accepted drafts of block verification, with the residual of rejection."""
    accepted, token = BLOCK(probs, draft, noise, start=start)
    if accepted == len(draft.tokens):
        return accepted, token
    residual = (probs[accepted] - draft.probs[accepted]).clamp(min=0)
    return accepted, noise.pick(residual if residual.any() else probs[accepted], Domain.FILL, start + accepted, start)


MISTAKES = [corrected_from_p, bonus_from_q, draws_twice, drops_unlikely_drafts, raw_q, block_residual_without_r]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_not_exact(mistake: Verify) -> None:
    detected = [seed for seed in range(20) if not is_exact(contextual(seed, 3), contextual(seed + 1000, 3), 2, mistake)]
    assert len(detected) > 5


def test_drawing_twice_for_a_one_hot_draft_is_not_exact() -> None:
    p = constant((Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)))
    probs = completed(outcome_probs(partial(one_hot_round, p, (1,), draws_twice)), p, 2)
    assert probs != joint(p, 2)
    assert sum(mass for text, mass in probs.items() if text[0] == 1) == Fraction(1, 4) * (2 - Fraction(1, 4))
