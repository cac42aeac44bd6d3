"""Drafts whose number is chosen, and chains of drafters, follow the target's law; choosing by the drawn token is seen to break it.

Statistics: 3 tokens, joint law of the first four, 3,000 runs; a correct decoder fails one of these tests with probability under 1e-5
(the seeds are fixed, so in fact always or never). One round is enumerated exactly in test_exact_laws.
"""

from functools import partial

import pytest
import torch
from toys import chi_square, decoding, joint_law, opposed, session, toy

from ngram_assisted import LongestMatch, MatchDrafter, SuffixAutomaton
from sampling import RULES, AdaptiveGamma, ChainDrafter, ModelDrafter, speculative_steps
from sampling.adaptive_gamma import Mark
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


def chosen(plan, kind=ModelDrafter, model=None):
    return kind(session(model or toy(2, SIZE)), plan, SIZE, length=AdaptiveGamma(COSTS, 0.1))


def chain_single_drafts(plan):
    return ChainDrafter(MatchDrafter(SuffixAutomaton(), length=AdaptiveGamma(COSTS)), chosen(plan))


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
    statistic, threshold = chi_square(
        partial(text, make, rule), joint_law(TARGET, MultinomialProcessor(1.0), START, LENGTH), TRIALS
    )
    return statistic / threshold


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "make",
    [chosen, partial(chosen, model=opposed(TARGET)), chain_single_drafts, looked_up],
    ids=["own", "opposed", "chain", "lookup"],
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


@pytest.mark.parametrize("shares", [False, True])
def test_drafts_that_were_worked_out_and_not_sent_are_told(shares: bool) -> None:
    forwards: list[int] = []

    class Counted(ModelSession):
        def feed(self, context: list[int], keep: int) -> torch.Tensor:
            forwards.append(1)
            return super().feed(context, keep)

    class Strict(AdaptiveGamma):
        """Of the three that it works out in a round it sends 0, 1 or 2 in turns."""

        rounds = 0

        def goes_on(self, marks: list[Mark]) -> bool:
            self.rounds += not marks
            return True

        def sends(self, marks: list[Mark]) -> bool:
            return len(marks) <= self.rounds % 3

    told = decoding(30, processor=MultinomialProcessor(1.0))
    drafter = ModelDrafter(
        Counted(toy(1, size=12), use_cache=False), told, 12, shares_noise=shares, length=Strict(COSTS)
    )
    drafts: list[tuple[int, int]] = []

    class Seen:
        begin, commit = drafter.begin, drafter.commit

        def propose(self, context: list[int], count: int) -> Draft:
            del forwards[:]
            draft = drafter.propose(context, count)
            assert draft.unsent == len(forwards) - len(draft.tokens)
            drafts.append((len(draft.tokens), draft.unsent))
            return draft

    list(
        speculative_steps(
            [1], Seen(), session(toy(0, size=12)), told, gamma=8, rule=RULES["coupled" if shares else "rejection"]
        )
    )
    assert any(sent and unsent for sent, unsent in drafts) and any(unsent and not sent for sent, unsent in drafts), (
        drafts
    )
