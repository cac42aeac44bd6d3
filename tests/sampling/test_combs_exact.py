"""Combs by exact enumeration: whatever leaves a round has, its tokens follow the target's distribution."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import product

import pytest
from exact import (
    Branching,
    Distribution,
    Exact,
    Row,
    Text,
    completed,
    contextual,
    grid,
    joint,
    mean_accepted,
    outcome_probs,
)

from sampling import RULES, Rule, verification
from sampling.verification import Outcome, verify_round
from utils.decode.drafts import Draft
from utils.decode.noise import Domain
from utils.decode.steps import Leaf

Counts = Callable[[Text], tuple[int, ...]]  # from the chain to the number of leaves in place of each draft
SHAPES: list[Counts] = [
    lambda chain: (1,) * len(chain),
    lambda chain: (2,) + (0,) * (len(chain) - 1),
    lambda chain: (2,) * len(chain),
    # Which places have leaves may depend on the chain, also on the draft itself and on later ones.
    lambda chain: (chain[-1] % 2, *(1 + token % 2 for token in chain[1:])),
]


def drawn_leaves(q: Distribution, chain: Text, counts: tuple[int, ...], noise: Branching) -> tuple[Leaf, ...]:
    """Leaves drawn from q without replacement. Those to which q gives no probability are listed after them."""
    leaves: list[Leaf] = []
    for place, count in enumerate(counts):
        rest, own = Exact(list(q(chain[:place]))), [chain[place]]
        while len(own) <= count:
            rest[own[-1]] = 0
            if rest.any():
                own.append(noise.pick(rest, Domain.LEAF, place, 0, index=len(own)))
            else:
                own += [token for token in range(len(rest)) if token not in own] or own[:1]
        leaves += [Leaf(place, token) for token in own[1 : count + 1] if token != chain[place]]
    return tuple(leaves)


def comb_round(p: Distribution, q: Distribution, gamma: int, counts: Counts, rule: Rule, noise: Branching) -> Text:
    """The tokens of one round: draft a chain from q and leaves beside it, then verify with p."""
    chain: Text = ()
    while len(chain) < gamma:
        chain = (*chain, noise.pick(Exact(q(chain)), Domain.DRAFT, len(chain), 0))
    leaves = drawn_leaves(q, chain, counts(chain), noise)
    before = [chain[:index] for index in range(gamma + 1)]
    rows = Exact([p(text) for text in (*before, *((*chain[: leaf.place], leaf.token) for leaf in leaves))])
    draft = Draft(list(chain), Exact([q(text) for text in before[:-1]]), leaves=leaves)  # type: ignore[arg-type]
    return text_of(draft, verify_round(rule, rows, draft, noise, start=0))  # type: ignore[arg-type]


def text_of(draft: Draft, outcome: Outcome) -> Text:
    leaf = () if outcome.leaf is None else (draft.leaves[outcome.leaf].token,)
    return (*draft.tokens[: outcome.accepted], *leaf, outcome.token)


def is_exact(p: Distribution, q: Distribution, gamma: int, counts: Counts, rule: Rule) -> bool:
    rounds = outcome_probs(partial(comb_round, p, q, gamma, counts, rule))
    return completed(rounds, p, gamma + 1) == joint(p, gamma + 1)


@pytest.mark.parametrize("rule", [RULES["rejection"], RULES["block"]], ids=lambda rule: rule.name)
@pytest.mark.parametrize("counts", SHAPES)
def test_combs_are_exact_for_distributions_on_a_grid(counts: Counts, rule: Rule) -> None:
    for p, q in product(grid(3, 4), repeat=2):
        assert is_exact(lambda text, p=p: p, lambda text, q=q: q, 1, counts, rule), (p, q)


@pytest.mark.parametrize("rule", [RULES["rejection"], RULES["block"]], ids=lambda rule: rule.name)
@pytest.mark.parametrize("counts", SHAPES)
@pytest.mark.parametrize(("size", "gamma", "pairs"), [(3, 2, 30), (4, 2, 8), (3, 3, 4)])
def test_combs_are_exact_for_distributions_that_depend_on_the_context(
    size: int, gamma: int, pairs: int, counts: Counts, rule: Rule
) -> None:
    for seed in range(pairs):
        assert is_exact(contextual(seed, size), contextual(1000 + seed, size), gamma, counts, rule), seed


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_leaves_beside_drafts_without_a_distribution_are_exact(rule: Rule) -> None:
    """For every set of leaves: they are listed, as n-grams or the next best tokens of greedy drafting would be."""
    p = contextual(5, 3)
    for chain in product(range(3), repeat=2):
        for sets in product(((), (0,), (1,), (2, 1), (0, 1, 2)), repeat=2):
            leaves = tuple(Leaf(place, token) for place in range(2) for token in sets[place] if token != chain[place])
            draft = Draft(list(chain), leaves=leaves)
            rows = [p(chain[:index]) for index in range(3)]
            rows += [p((*chain[: leaf.place], leaf.token)) for leaf in leaves]

            def walk(noise: Branching, draft: Draft = draft, rows: list[Row] = rows) -> Text:
                return text_of(draft, verify_round(rule, Exact(rows), draft, noise, start=0))  # type: ignore[arg-type]

            assert completed(outcome_probs(walk), p, 3) == joint(p, 3)


def test_leaves_are_accepted_as_often_as_recursive_rejection_can() -> None:
    """With all tokens but one as leaves at the first place, one of the tokens there is always accepted."""
    rounds = outcome_probs(
        partial(comb_round, contextual(3, 3), lambda text: (Fraction(1, 3),) * 3, 1, SHAPES[1], RULES["rejection"])
    )
    assert mean_accepted(rounds) == 1


def chain_token_kept(weights: Exact, token: int) -> Exact:
    return weights


def test_known_mistakes_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, counts = RULES["rejection"], SHAPES[2]
    pairs = [(contextual(seed, 3), contextual(1000 + seed, 3)) for seed in range(10)]
    with monkeypatch.context() as patch:
        patch.setattr(verification, "without", chain_token_kept)  # q still holds what was rejected
        assert not all(is_exact(p, q, 2, counts, rule) for p, q in pairs)
    with monkeypatch.context() as patch:
        patch.setattr(verification, "_accepted_leaf", lambda residual, *rest, **options: (rest[0].leaves[0].token, 0))
        assert not all(is_exact(p, q, 2, counts, rule) for p, q in pairs)
