"""Drafts whose number is chosen, and chains of drafters, follow the target's law; choosing by the drawn token is seen to break it.

Statistics: 3 tokens, joint law of the first four, 3,000 runs; a correct decoder fails one of these tests with probability under 1e-5
(the seeds are fixed, so in fact always or never). One round is enumerated exactly in test_exact_laws.
"""

from functools import partial

import pytest
from toys import chi_square, decoding, joint_law, opposed, session, toy

from ngram_assisted import LongestMatch, MatchDrafter, SuffixAutomaton
from sampling import RULES, ChainDrafter, DraftLength, ModelDrafter, speculative_steps
from sampling.drafting import Draft
from utils.costs import Costs
from utils.logits_processor import MultinomialProcessor
from utils.results import tokens_of

TRIALS, LENGTH, START, SIZE, GAMMA = 3000, 4, 0, 3, 4
TARGET = toy(1, SIZE)
COSTS = Costs((0.3, 0.35, 0.4, 0.45))


def text(make, rule, seed):
    plan = decoding(LENGTH, processor=MultinomialProcessor(1.0), seed=seed)
    rounds = speculative_steps([START], make(plan), session(TARGET), plan, gamma=GAMMA, rule=RULES[rule])
    return tuple(tokens_of(rounds))


def chosen(plan, kind=ModelDrafter, model=None):
    return kind(session(model or toy(2, SIZE)), plan, SIZE, length=DraftLength(COSTS, 0.1))


def chained(plan):
    return ChainDrafter(MatchDrafter(SuffixAutomaton(), length=DraftLength(COSTS)), chosen(plan))


def looked_up(plan):
    return ChainDrafter(MatchDrafter(LongestMatch(1)), chosen(plan, model=opposed(TARGET)))


class Peeking(ModelDrafter):
    """Gives up drafts behind a token that it finds unlikely itself, once that is drawn."""

    def propose(self, context, count):
        draft = super().propose(context, count)
        for index, token in enumerate(draft.tokens):
            if draft.probs[index, token] < 0.4:
                self._sent = (self._sent[0][:index], self._sent[1][:index], index)
                return Draft(draft.tokens[:index], draft.probs[:index]) if index else Draft([])
        return draft


def far_from_the_law(make, rule):
    statistic, threshold = chi_square(partial(text, make, rule), joint_law(TARGET, MultinomialProcessor(1.0), START, LENGTH), TRIALS)
    return statistic / threshold


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "make", [chosen, partial(chosen, model=opposed(TARGET)), chained, looked_up], ids=["own", "opposed", "chain", "lookup"]
)
def test_the_law_is_the_targets(make, rule):
    assert far_from_the_law(make, rule) < 1


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_choosing_by_the_drawn_token_is_noticed(rule):
    assert far_from_the_law(partial(chosen, kind=Peeking), rule) > 1


def test_rounds_are_of_all_lengths():
    """Or the tests above would test nothing new."""
    seen = set()
    for seed in range(100):
        plan = decoding(LENGTH, processor=MultinomialProcessor(1.0), seed=seed)
        rounds = speculative_steps([START], chosen(plan), session(TARGET), plan, gamma=GAMMA)
        seen |= {len(step.drafted) for step in rounds}
    assert seen >= {0, 1, 2}
