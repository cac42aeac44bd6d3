"""The verification rules by exact enumeration: the law of what they emit is the target's, as an equality of fractions.

Every outcome of every draw of a round is walked through, on laws over grids and on random laws that depend on the whole context; behind
the round plain decoding goes on, and the joint law of gamma + 1 tokens must be p's. Rounds use noise of their own (test_noise.py holds
that), so one round is enough. Known mistakes are seen to fail.
"""

from fractions import Fraction
from functools import partial
from itertools import product
from random import Random

import pytest
from exact import (
    Branching,
    Exact,
    Judge,
    Law,
    Row,
    Text,
    accepted_on_average,
    completed,
    grid,
    joint,
    law_of_round,
    one_hot_round,
    one_round,
)

from sampling import RULES, choose_rule
from sampling.verification import verify_rejection
from utils.decode.drafts import Draft
from utils.decode.noise import Domain

REJECTION, BLOCK = RULES["rejection"], RULES["block"]


def constant(row: Row) -> Law:
    return lambda text: row


def contextual(seed: int, size: int) -> Law:
    """A random law over `size` tokens for every context, some tokens of probability 0 among them."""
    rows: dict[Text, Row] = {}
    source = Random(seed)

    def law(text: Text) -> Row:
        if text not in rows:
            weights = [source.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(size)]
            weights[source.randrange(size)] += 1
            rows[text] = tuple(Fraction(weight, sum(weights)) for weight in weights)
        return rows[text]

    return law


def is_exact(p: Law, q: Law, gamma: int, judge: Judge) -> bool:
    rounds = law_of_round(partial(one_round, p, q, gamma, judge))
    return completed(rounds, p, gamma + 1) == joint(p, gamma + 1)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize(("size", "steps"), [(2, 12), (3, 6), (4, 4)])
def test_one_draft_is_exact_for_every_pair_of_laws(rule: Judge, size: int, steps: int) -> None:
    for p, q in product(grid(size, steps), repeat=2):
        assert is_exact(constant(p), constant(q), 1, rule), (p, q)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize(("size", "steps", "gamma"), [(2, 8, 2), (3, 4, 2), (4, 2, 2), (2, 6, 3), (3, 3, 3), (4, 2, 3)])
def test_longer_drafts_are_exact_for_laws_on_a_grid(rule: Judge, size: int, steps: int, gamma: int) -> None:
    for p, q in product(grid(size, steps), repeat=2):
        assert is_exact(constant(p), constant(q), gamma, rule), (p, q)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize("gamma", [2, 3])
def test_longer_drafts_are_exact_for_laws_that_depend_on_the_context(rule: Judge, gamma: int) -> None:
    """200 pairs of laws over two to four tokens."""
    for seed in range(200):
        size = 2 + seed % 3
        assert is_exact(contextual(seed, size), contextual(seed + 1000, size), gamma, rule), seed


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
@pytest.mark.parametrize("gamma", [2, 3])
def test_drafts_that_stop_behind_what_was_drafted_are_exact(rule: Judge, gamma: int) -> None:
    """Whether there is one more draft may depend on all earlier ones and on the law of the next, not on the token drawn from it."""
    lengths: set[int] = set()
    for seed in range(200):
        size, p, q = 2 + seed % 3, contextual(seed, 2 + seed % 3), contextual(seed + 1000, 2 + seed % 3)
        source = Random(seed)
        where = {text: source.random() < 0.4 for length in range(gamma) for text in product(range(size), repeat=length)}
        rounds = law_of_round(partial(one_round, p, q, gamma, rule, stops=where.__getitem__))
        assert completed(rounds, p, gamma + 1) == joint(p, gamma + 1), seed
        lengths.update(map(len, rounds))
    assert lengths == {*range(1, gamma + 2)}


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_drafts_without_a_law_are_exact_whatever_was_drafted(rule: Judge, gamma: int) -> None:
    for size, steps in ((2, 4), (3, 3), (4, 2)):
        for row in grid(size, steps):
            for drafted in product(range(size), repeat=gamma):
                p = constant(row)
                assert completed(law_of_round(partial(one_hot_round, p, drafted, rule)), p, gamma + 1) == joint(
                    p, gamma + 1
                )
    for seed in range(20):
        p = contextual(seed, 3)
        for drafted in product(range(3), repeat=gamma):
            assert completed(law_of_round(partial(one_hot_round, p, drafted, rule)), p, gamma + 1) == joint(
                p, gamma + 1
            )


def test_block_never_accepts_less_than_rejection_and_more_somewhere() -> None:
    gains = 0
    for seed in range(120):
        p, q, gamma = contextual(seed, 3), contextual(seed + 500, 3), 2 + seed % 2
        rejection, block = (
            accepted_on_average(law_of_round(partial(one_round, p, q, gamma, rule))) for rule in (REJECTION, BLOCK)
        )
        assert block >= rejection, seed
        gains += block > rejection
    assert gains > 60


def test_with_one_draft_block_is_rejection() -> None:
    for p, q in product(grid(3, 4), repeat=2):
        laws = [law_of_round(partial(one_round, constant(p), constant(q), 1, rule)) for rule in (REJECTION, BLOCK)]
        assert laws[0] == laws[1]


def test_rejection_accepts_the_overlap_of_the_laws() -> None:
    """alpha = sum min(p, q) (Leviathan et al. 2023, theorem 3.5), and 1 - alpha^2 over 1 - alpha tokens from two constant laws' drafts."""
    for p, q in product(grid(3, 4), repeat=2):
        alpha = sum(map(min, p, q), Fraction(0))
        rounds = [law_of_round(partial(one_round, constant(p), constant(q), gamma, REJECTION)) for gamma in (1, 2)]
        assert [accepted_on_average(law) for law in rounds] == [alpha, alpha + alpha**2]


def corrected_from_p(law: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    return choose_rule("rejection", adjust=False)(law, draft, noise, start=start)


def bonus_from_q(law: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    law.values[-1] = draft.probs.values[-1]
    return verify_rejection(law, draft, noise, start=start)


def draws_twice(law: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    """Sample, compare, and on a mismatch sample again: a draft comes out with probability p (2 - p)."""
    for index, wanted in enumerate(draft.tokens):
        if noise.sample(law[index], start + index) != wanted:
            return index, noise.pick(law[index], Domain.RESIDUAL, start + index, start)
    return len(draft.tokens), noise.sample(law[-1], start + len(draft.tokens))


def drops_unlikely_drafts(law: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    """A draft is given up behind a token that the drafter itself found unlikely, after that token was drawn."""
    for index, token in enumerate(draft.tokens):
        if draft.probs.values[index][token] < Fraction(1, 3):
            kept = Draft(draft.tokens[:index], draft.probs[slice(0, index)])
            return verify_rejection(law[slice(0, index + 1)], kept, noise, start=start)
    return verify_rejection(law, draft, noise, start=start)


def raw_q(law: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    """Drafts drawn from the processed law, judged by an unprocessed one."""
    flat = [tuple((value + Fraction(1, len(row))) / 2 for value in row) for row in draft.probs.values]
    return verify_rejection(law, Draft(draft.tokens, Exact(flat)), noise, start=start)


def block_residual_without_r(law: Exact, draft: Draft, noise: Branching, *, start: int) -> tuple[int, int]:
    """Block verification's choice of how many stand, with rejection's residual behind them."""
    accepted, token = BLOCK(law, draft, noise, start=start)
    if accepted == len(draft.tokens):
        return accepted, token
    residual = (law[accepted] - draft.probs[accepted]).clamp(min=0)
    return accepted, noise.pick(residual if residual.any() else law[accepted], Domain.FILL, start + accepted, start)


MUTANTS = [corrected_from_p, bonus_from_q, draws_twice, drops_unlikely_drafts, raw_q, block_residual_without_r]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mistakes_are_not_exact(mutant: Judge) -> None:
    found = [seed for seed in range(20) if not is_exact(contextual(seed, 3), contextual(seed + 1000, 3), 2, mutant)]
    assert len(found) > 5


def test_drawing_twice_for_a_draft_without_a_law_is_not_exact() -> None:
    p = constant((Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)))
    law = completed(law_of_round(partial(one_hot_round, p, (1,), draws_twice)), p, 2)
    assert law != joint(p, 2)
    assert sum(mass for text, mass in law.items() if text[0] == 1) == Fraction(1, 4) * (2 - Fraction(1, 4))
