"""With adaptive gamma and with chains of drafters the text follows the target's distribution. A drafter that decides by
the token it has drawn does not, and these tests detect it.

Every path of whole runs is enumerated (see exact.py), so there are no false alarms. test_verification_exact.py
enumerates one round with any stopping rule.
"""

from functools import partial

import pytest
import torch
from exact import distance, text_probs
from toys import decoding, drafting_gamma, joint_probs, opposed, session, toy

from ngram_assisted import LongestMatch, MatchDrafter, SuffixAutomaton
from sampling import RULES, AdaptiveGamma, ChainDrafter, ModelDrafter, speculative_steps
from sampling.drafters.adaptive_gamma import Bucket
from utils.decode.drafts import Draft
from utils.decode.model_session import ModelSession
from utils.decode.noise import Noise
from utils.logits_processor import MultinomialProcessor
from utils.metrics.costs import Costs

START, GAMMA = 0, 4
SIZES = [(3, 3), (2, 4)]  # (vocabulary size, number of new tokens)
COSTS = Costs((0.2, 0.25, 0.3, 0.35))


def run(make, rule, size, length, noise):
    target, plan = toy(1, size), decoding(length, noise=noise)
    drafter = make(plan, target)
    return speculative_steps([START], drafter, session(target), plan, gamma=GAMMA, rule=RULES[rule])


def adaptive(plan, target, kind=ModelDrafter, model=None, gamma=None):
    size = target.config.vocab_size
    return kind(session(model or toy(2, size)), plan, size, adaptive=gamma or drafting_gamma(COSTS, 0.1))


def bounded(plan, target):
    """What drafts may lose is bounded, so their number depends on all earlier rounds."""
    size = target.config.vocab_size
    gamma = drafting_gamma(COSTS, 0.1, max_new=100)
    return ModelDrafter(session(toy(2, size)), plan, size, adaptive=gamma)


def adaptive_opposed(plan, target):
    return adaptive(plan, target, model=opposed(target))


def suffix_chain(plan, target):
    return ChainDrafter(MatchDrafter(SuffixAutomaton(), adaptive=AdaptiveGamma(COSTS)), adaptive(plan, target))


def rival_chain(plan, target):
    """Each round belongs to the drafter that has gained more in earlier ones."""
    costs = Costs((0.1, 0.15, 0.2, 0.25))
    rival = drafting_gamma(costs, 0.35)
    first = MatchDrafter(SuffixAutomaton(), adaptive=AdaptiveGamma(costs, rival=rival))
    return ChainDrafter(first, adaptive(plan, target, gamma=rival), kinds=("suffix", "model"))


def lookup_chain(plan, target):
    return ChainDrafter(MatchDrafter(LongestMatch(1)), adaptive_opposed(plan, target))


class Peeking(ModelDrafter):
    """Drops drafts from the first token on that it finds unlikely itself, after that token was drawn."""

    def propose(self, context, count):
        draft = super().propose(context, count)
        for index, token in enumerate(draft.tokens):
            if draft.probs[index, token] < 0.4:
                return Draft(draft.tokens[:index], draft.probs[:index]) if index else Draft([])
        return draft


def error(make, rule, size, length):
    """Total variation distance from the target's joint distribution of `length` tokens."""
    expected = joint_probs(toy(1, size), MultinomialProcessor(1.0), START, length)
    return distance(text_probs(partial(run, make, rule, size, length)), expected)


@pytest.mark.parametrize(
    ("rule", "size", "length"),
    [
        ("rejection", *SIZES[0]),
        ("block", *SIZES[1]),
        pytest.param("rejection", *SIZES[1], marks=pytest.mark.full),
        pytest.param("block", *SIZES[0], marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("make", [adaptive, bounded, adaptive_opposed, suffix_chain, rival_chain, lookup_chain])
def test_text_follows_the_targets_distribution(make, size, length, rule):
    assert error(make, rule, size, length) < 1e-12


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_deciding_by_the_drawn_token_is_detected(rule):
    """The distance is 0.27."""
    assert error(partial(adaptive, kind=Peeking), rule, 2, 3) > 0.1


@pytest.mark.parametrize(("size", "length"), SIZES)
def test_the_number_of_drafts_varies(size, length):
    """Otherwise the tests above would only cover a fixed gamma."""
    seen = set()
    for seed in range(100):
        seen |= {len(step.drafted) for step in run(adaptive, "rejection", size, length, Noise(seed))}
    assert seen == {*range(length)}


def test_both_drafters_of_a_chain_have_rounds(monkeypatch):
    """Otherwise the tests above would only cover one of them."""
    seen, propose = set(), ChainDrafter.propose

    def recorded(self, context, count):
        draft = propose(self, context, count)
        seen.add((draft.kind, bool(draft.tokens)))
        return draft

    monkeypatch.setattr(ChainDrafter, "propose", recorded)
    for seed in range(100):
        list(run(rival_chain, "rejection", 2, 4, Noise(seed)))
    assert {("suffix", True), ("model", True), ("model", False)} <= seen


@pytest.mark.parametrize("shares", [False, True])
def test_computed_drafts_that_are_not_proposed_are_counted(shares: bool) -> None:
    forwards: list[int] = []

    class Counted(ModelSession):
        def feed(self, context: list[int], keep: int) -> torch.Tensor:
            forwards.append(1)
            return super().feed(context, keep)

    class Strict(AdaptiveGamma):
        """Proposes 0, 1 or 2 drafts in turn, and always computes one more."""

        rounds = 0

        def continues(self, buckets: list[Bucket]) -> bool:
            self.rounds += not buckets
            return True

        def proposes(self, buckets: list[Bucket]) -> bool:
            return len(buckets) <= self.rounds % 3

    plan = decoding(30, processor=MultinomialProcessor(1.0))
    drafter = ModelDrafter(
        Counted(toy(1, size=12), use_cache=False), plan, 12, shares_noise=shares, adaptive=Strict(COSTS)
    )
    drafts: list[tuple[int, int]] = []

    class Observed:
        begin, commit = drafter.begin, drafter.commit

        def propose(self, context: list[int], count: int) -> Draft:
            del forwards[:]
            draft = drafter.propose(context, count)
            assert draft.withheld == len(forwards) - len(draft.tokens)
            drafts.append((len(draft.tokens), draft.withheld))
            return draft

    rule = RULES["coupled" if shares else "rejection"]
    list(speculative_steps([1], Observed(), session(toy(0, size=12)), plan, gamma=8, rule=rule))
    assert any(proposed and withheld for proposed, withheld in drafts), drafts
    assert any(withheld and not proposed for proposed, withheld in drafts), drafts
