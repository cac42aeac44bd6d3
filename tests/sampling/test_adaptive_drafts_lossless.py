"""With adaptive gamma and with chains of drafters the text follows the target's distribution. A drafter that decides by
the token it has drawn does not, and these tests detect it.

Statistics: 3 tokens, joint distribution of the first four, 3,000 runs. A correct decoder fails a test with probability
below 1e-5. The seeds are fixed, so results are reproducible. test_verification_exact.py enumerates one round exactly.
"""

from functools import partial

import pytest
import torch
from toys import chi_square, decoding, joint_probs, opposed, session, toy

from ngram_assisted import LongestMatch, MatchDrafter, SuffixAutomaton
from sampling import RULES, AdaptiveGamma, ChainDrafter, ModelDrafter, speculative_steps
from sampling.adaptive_gamma import Bucket
from utils.decode.drafts import Draft
from utils.decode.model_session import ModelSession
from utils.logits_processor import MultinomialProcessor
from utils.metrics.costs import Costs
from utils.metrics.results import tokens_of

TRIALS, LENGTH, START, SIZE, GAMMA = 3000, 4, 0, 3, 4
TARGET = toy(1, SIZE)
COSTS = Costs((0.3, 0.35, 0.4, 0.45))


def text(make, rule, seed):
    plan = decoding(LENGTH, processor=MultinomialProcessor(1.0), seed=seed)
    rounds = speculative_steps([START], make(plan), session(TARGET), plan, gamma=GAMMA, rule=RULES[rule])
    return tuple(tokens_of(rounds))


def adaptive(plan, kind=ModelDrafter, model=None):
    return kind(session(model or toy(2, SIZE)), plan, SIZE, adaptive=AdaptiveGamma(COSTS, 0.1))


def suffix_chain(plan):
    return ChainDrafter(MatchDrafter(SuffixAutomaton(), adaptive=AdaptiveGamma(COSTS)), adaptive(plan))


def lookup_chain(plan):
    return ChainDrafter(MatchDrafter(LongestMatch(1)), adaptive(plan, model=opposed(TARGET)))


class Peeking(ModelDrafter):
    """Drops drafts from the first token on that it finds unlikely itself, after that token was drawn."""

    def propose(self, context, count):
        draft = super().propose(context, count)
        for index, token in enumerate(draft.tokens):
            if draft.probs[index, token] < 0.4:
                return Draft(draft.tokens[:index], draft.probs[:index]) if index else Draft([])
        return draft


def deviation(make, rule):
    """The chi-square statistic divided by its threshold."""
    statistic, threshold = chi_square(
        partial(text, make, rule), joint_probs(TARGET, MultinomialProcessor(1.0), START, LENGTH), TRIALS
    )
    return statistic / threshold


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "make",
    [adaptive, partial(adaptive, model=opposed(TARGET)), suffix_chain, lookup_chain],
    ids=["model", "opposed", "suffix chain", "lookup chain"],
)
def test_text_follows_the_targets_distribution(make, rule):
    assert deviation(make, rule) < 1


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_deciding_by_the_drawn_token_is_detected(rule):
    assert deviation(partial(adaptive, kind=Peeking), rule) > 1


def test_the_number_of_drafts_varies():
    """Otherwise the tests above would only cover a fixed gamma."""
    seen = set()
    for seed in range(100):
        plan = decoding(LENGTH, processor=MultinomialProcessor(1.0), seed=seed)
        rounds = speculative_steps([START], adaptive(plan), session(TARGET), plan, gamma=GAMMA)
        seen |= {len(step.drafted) for step in rounds}
    assert seen >= {0, 1, 2}


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
