"""How many drafts are sent: the number with the most value by the table of costs, learnt from the run, never by the clock."""

from itertools import product

import pytest
from tiny import tiny_head, tiny_llama

from ngram_assisted import MatchDrafter, NGramDrafter, NGramStorage, SuffixAutomaton
from sampling import (
    RULES,
    AdaptiveGamma,
    ChainDrafter,
    HeadDrafter,
    HeadSession,
    ModelDrafter,
    autoregressive_steps,
    speculative_steps,
)
from sampling.adaptive_gamma import ThroughputEstimate
from utils.bounds import RULES as RULE_NAMES
from utils.decode.decoding import Decoding
from utils.decode.drafts import Verified
from utils.decode.model_session import ModelSession
from utils.logits_processor import GreedyProcessor, MultinomialProcessor
from utils.metrics.costs import Costs
from utils.metrics.results import tokens_of

DEAR, CHEAP = Costs((0.8, 1.1, 1.2, 1.3)), Costs((0.05, 0.1, 0.15, 0.2))


def sizes(*tokens):
    return [("size", size) for size in tokens]


def value(length, marks):
    """Expected tokens of drafts with these marks, less what plain decoding makes in the time they add."""
    tokens, reached = 0.0, 1.0
    for mark in marks:
        reached *= length.chance(mark)
        tokens += reached
    return tokens - length.pace * length.cost(len(marks))


@pytest.mark.parametrize("costs", [DEAR, CHEAP, Costs((0.3,))])
def test_the_best_number_is_the_best_of_all_numbers(costs):
    length = AdaptiveGamma(costs)
    for marks in product(sizes(1, 2, 3), repeat=5):
        assert value(length, marks[: length.best(marks)]) == max(value(length, marks[:count]) for count in range(6))


@pytest.mark.parametrize("step", [0.0, 0.05, 0.4])
def test_a_draft_is_computed_where_some_longer_draft_has_more_value(step):
    length = AdaptiveGamma(DEAR, step)
    for marks in product([("sure", 1), ("sure", 7)], repeat=3):
        for count in range(4):
            known = list(marks[:count])
            longer = [
                value(length, [*known, *(("place", place) for place in range(count, count + more))])
                for more in range(1, 9)
            ]
            assert length.goes_on(known) == (max(longer) > value(length, known))


def test_a_draft_that_was_computed_is_sent_where_it_pays_for_the_wider_window():
    length = AdaptiveGamma(Costs((0.3, 0.7)))
    assert length.sends([("sure", 7)]) and not length.sends([("sure", 0)])
    assert length.sends([("sure", 7), ("sure", 4)]) and not length.sends([("sure", 7), ("sure", 1)])


def test_it_stops_drafting_where_nothing_stands_and_tries_again_later():
    length, marks = AdaptiveGamma(Costs((0.2, 0.3, 0.4))), sizes(2, 2, 2)
    assert length.best(marks) == 3
    for _ in range(40):
        length.learn(marks[: length.best(marks)], 0)
    tries = []
    for _ in range(200):
        count = length.best(marks)
        tries.append(count)
        length.learn(marks[:count], 0)
    assert 0 < sum(count > 0 for count in tries) < 40  # seldom, but again and again


def test_a_drafter_that_fails_is_asked_seldom_but_again_and_again():
    length, tries = AdaptiveGamma(Costs((0.1, 0.2)), 0.1), []
    for _ in range(300):
        tries.append(length.goes_on([]))
        length.learn([("sure", 4)] if tries[-1] else [], 0)
    assert tries[0] and 0 < sum(tries[100:]) < 40


def test_what_stands_is_drafted_longer():
    length = AdaptiveGamma(DEAR)
    assert length.best(sizes(*[1] * 8)) == 0
    for _ in range(30):
        length.learn(sizes(1, 1, 1, 1), 4)
    assert length.best(sizes(*[1] * 8)) == 8
    assert length.chance(("size", 1)) < 1


def test_what_the_run_makes_anyway_is_what_a_draft_must_beat():
    """The same drafts are fewer where long ones have made the run fast."""
    slow, fast = AdaptiveGamma(DEAR), AdaptiveGamma(DEAR)
    for _ in range(50):
        fast.learn(sizes(*[9] * 8), 8)
    assert fast.pace > 2 > slow.pace == 1
    assert fast.best(sizes(4, 4, 4, 4)) < slow.best(sizes(4, 4, 4, 4))


def test_only_what_was_reached_is_evidence():
    length = AdaptiveGamma(CHEAP)
    before = length.chance(("size", 3))
    length.learn(sizes(2, 2, 3, 3), 1)  # the second failed: the others were never tried
    assert length.chance(("size", 3)) == before
    assert length.chance(("size", 0)) == 0  # drawn at random
    assert length.chance(("place", 0)) > length.chance(("place", 2)) > length.chance(("place", 1))


def test_costs_go_on_beyond_the_last_one():
    costs = Costs((0.1, 0.3), (("head", 0.07),))
    assert [round(costs.verify_cost(count), 6) for count in range(5)] == [0, 0.1, 0.3, 0.5, 0.7]
    assert [costs.draft_cost(kind) for kind in ("head", "model", None)] == [0.07, 0.0, 0.0]
    assert round(AdaptiveGamma(costs, 0.07).cost(2), 6) == 0.44
    assert AdaptiveGamma(Costs()).best(sizes(1, 1)) == 2  # nothing could be measured
    assert Costs.of([0.12345, -1.0, 1e9], {"head": 0.0712}) == Costs((0.123, 0.0, 1000.0), (("head", 0.071),))


class Ear(AdaptiveGamma):
    """Remembers what it was taught."""

    def __init__(self, costs, step=0.0):
        super().__init__(costs, step)
        self.heard = []

    def learn(self, marks, accepted, computed=0):
        self.heard.append((list(marks), accepted))
        super().learn(marks, accepted, computed)


def test_the_ngram_drafter_learns_how_many_of_its_drafts_stood():
    storage, plan, ear = NGramStorage(3, 64), Decoding.of(None, 9, end_ids=None, seed=0), Ear(Costs((0.0,)))
    drafter = NGramDrafter(storage, plan.noise, filler_top_k=1, length=ear)
    drafter.begin([5, 6, 7, 8, 5, 6], [5, 6, 7, 8, 5, 6])
    draft = drafter.propose([5, 6, 7, 8, 5, 6], 3)
    assert draft.tokens == [7, 8, 5]
    drafter.commit([5, 6, 7, 8, 5, 6, 7, 8, 9], Verified(6, None, None))  # type: ignore[arg-type]
    assert ear.heard == [(sizes(2, 2, 2), 2)]


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_model_learns_what_became_of_its_drafts_round_by_round(rule, kind):
    target, plan, ear = (
        tiny_llama(vocab_size=8),
        Decoding.of(MultinomialProcessor(1.0), 60, end_ids=None, seed=3),
        Ear(Costs((0.02,)), 0.02),
    )
    shares = RULES[rule].shares_noise
    if kind == "model":
        session, drafter = (
            ModelSession(target),
            ModelDrafter(ModelSession(tiny_llama(1, vocab_size=8)), plan, 8, shares_noise=shares, length=ear),
        )
    else:
        model = tiny_head(target, vocabulary=range(8))
        session = ModelSession(target, features=model.head.shape.layers)
        drafter = HeadDrafter(HeadSession(model), plan, 8, shares_noise=shares, length=ear)
    steps = list(speculative_steps([1, 2, 3], drafter, session, plan, gamma=6, rule=RULES[rule]))
    assert [(len(marks), accepted) for marks, accepted in ear.heard] == [
        (len(step.drafted), step.accepted) for step in steps
    ]
    assert len({len(step.drafted) for step in steps}) > 1 and sum(step.accepted for step in steps)


@pytest.mark.parametrize("seed", range(4))
def test_choosing_changes_the_drafts_and_never_the_text(seed):
    model = tiny_llama()
    plan = Decoding.of(None, 60, end_ids=None, seed=seed)

    def run(length):
        drafter = NGramDrafter(NGramStorage(3, 64), plan.noise, length=length)
        steps = list(speculative_steps([1, 2, seed], drafter, ModelSession(model), plan, gamma=6))
        return tokens_of(steps), sum(len(step.drafted) for step in steps)

    fixed, dear, cheap = run(None), run(AdaptiveGamma(DEAR)), run(AdaptiveGamma(CHEAP))
    assert fixed[0] == dear[0] == cheap[0]
    assert dear[1] <= cheap[1] < fixed[1] and cheap[1] > 0


@pytest.mark.parametrize(
    ("rule", "processor"), [(name, GreedyProcessor()) for name in RULE_NAMES] + [("coupled", MultinomialProcessor(1.0))]
)
def test_a_models_chosen_drafts_leave_the_text_alone_and_one_table_is_one_text(rule, processor):
    target, other = tiny_llama(vocab_size=8), tiny_llama(1, vocab_size=8)
    plan = Decoding.of(processor, 80, end_ids=None, seed=5)
    plain = tokens_of(autoregressive_steps([1, 2, 3], ModelSession(target, rewinds=False), plan))

    def run(costs):
        length = AdaptiveGamma(costs, 0.05)
        drafter = ModelDrafter(ModelSession(other), plan, 8, shares_noise=RULES[rule].shares_noise, length=length)
        return list(speculative_steps([1, 2, 3], drafter, ModelSession(target), plan, gamma=8, rule=RULES[rule]))

    first, again, dear = run(CHEAP), run(CHEAP), run(DEAR)
    assert tokens_of(first) == tokens_of(dear) == plain
    assert first == again != dear


def test_drafters_of_one_run_share_its_tempo_and_learn_what_they_were_asked():
    """The second of a chain is not asked where the first drafts; where neither drafts, the round counts once."""
    tempo = ThroughputEstimate()
    first, second = AdaptiveGamma(CHEAP, 0.0, tempo), AdaptiveGamma(CHEAP, 0.1, tempo)
    first.learn(sizes(3, 3), 2)
    alone = ThroughputEstimate()
    alone.add(3, 1.1)
    assert first.pace == second.pace == alone.pace > 1
    first.learn([], 0)  # declined: the second was asked
    assert first.pace == alone.pace
    second.learn([("sure", 5)], 1, computed=2)
    alone.add(2, 1 + 0.05 + 0.2)
    assert first.pace == alone.pace


def test_a_drafter_that_was_not_asked_learns_nothing():
    target, plan, ear = tiny_llama(vocab_size=8), Decoding.of(None, 30, end_ids=None, seed=0), Ear(Costs((0.02,)))
    model = ModelDrafter(ModelSession(tiny_llama(1, vocab_size=8)), plan, 8, length=ear)
    first = MatchDrafter(SuffixAutomaton())
    steps = list(speculative_steps([1, 2, 3, 1, 2], ChainDrafter(first, model), ModelSession(target), plan, gamma=4))
    assert 0 < len(ear.heard) < len(steps)
