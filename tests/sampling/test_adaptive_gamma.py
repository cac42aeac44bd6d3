"""Adaptive gamma: the number of drafts with the highest value by the table of costs, learned from the run alone."""

from itertools import product

import pytest
from tiny import tiny_head, tiny_llama
from toys import drafting_gamma

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
from sampling.drafters.adaptive_gamma import MARGIN, ThroughputEstimate
from utils.bounds import RULES as RULE_NAMES
from utils.decode.decoding import Decoding
from utils.decode.drafts import Verified
from utils.decode.model_session import ModelSession
from utils.logits_processor import GreedyProcessor, MultinomialProcessor
from utils.metrics.costs import Costs
from utils.metrics.results import tokens_of

EXPENSIVE, CHEAP = Costs((0.8, 1.1, 1.2, 1.3)), Costs((0.05, 0.1, 0.15, 0.2))


def matches(*lengths):
    return [("match", length) for length in lengths]


def value(adaptive, buckets):
    """Expected tokens of drafts in these buckets, minus what they must gain at least, and minus what the run generates
    in the time that they add.
    """
    tokens, reached = 0.0, 1.0
    for bucket in buckets:
        reached *= adaptive.probability(bucket)
        tokens += reached
    return tokens - MARGIN * bool(buckets) - adaptive.rate * adaptive.cost(len(buckets))


@pytest.mark.parametrize("costs", [EXPENSIVE, CHEAP, Costs((0.3,))])
def test_the_chosen_number_has_the_highest_value(costs):
    adaptive = AdaptiveGamma(costs)
    for buckets in product(matches(1, 2, 3), repeat=5):
        assert value(adaptive, buckets[: adaptive.best(buckets)]) == max(
            value(adaptive, buckets[:count]) for count in range(6)
        )


@pytest.mark.parametrize("step", [0.0, 0.05, 0.4])
def test_one_more_draft_is_computed_if_more_drafts_have_a_higher_value(step):
    adaptive = drafting_gamma(EXPENSIVE, step)
    for buckets in product([("confidence", 1), ("confidence", 7)], repeat=3):
        for count in range(4):
            known = list(buckets[:count])
            longer = [
                value(adaptive, [*known, *(("position", position) for position in range(count, count + more))])
                for more in range(1, 9)
            ]
            assert adaptive.continues(known) == (max(longer) > value(adaptive, known))


def test_a_computed_draft_is_proposed_if_it_is_worth_a_wider_verify_pass():
    adaptive = AdaptiveGamma(Costs((0.3, 0.7)))
    assert adaptive.proposes([("confidence", 7)]) and not adaptive.proposes([("confidence", 0)])
    assert adaptive.proposes([("confidence", 7), ("confidence", 4)]) and not adaptive.proposes(
        [("confidence", 7), ("confidence", 1)]
    )


def test_it_stops_drafting_if_nothing_is_accepted_and_tries_again_later():
    adaptive, buckets = AdaptiveGamma(Costs((0.2, 0.3, 0.4))), matches(2, 2, 2)
    assert adaptive.best(buckets) == 3
    for _ in range(40):
        adaptive.learn(buckets[: adaptive.best(buckets)], 0)
    tries = []
    for _ in range(200):
        count = adaptive.best(buckets)
        tries.append(count)
        adaptive.learn(buckets[:count], 0)
    assert 0 < sum(count > 0 for count in tries) < 40  # rarely, but repeatedly


def test_a_failing_drafter_is_used_rarely_but_repeatedly():
    adaptive, tries = drafting_gamma(Costs((0.1, 0.2)), 0.1), []
    for _ in range(300):
        tries.append(adaptive.continues([]))
        adaptive.learn([("confidence", 4)] if tries[-1] else [], 0)
    assert tries[0] and 0 < sum(tries[100:]) < 40


def test_more_is_drafted_after_accepted_drafts():
    adaptive = AdaptiveGamma(EXPENSIVE)
    assert adaptive.best(matches(*[1] * 8)) == 0
    for _ in range(30):
        adaptive.learn(matches(1, 1, 1, 1), 4)
    assert adaptive.best(matches(*[1] * 8)) == 8
    assert adaptive.probability(("match", 1)) < 1


def test_drafts_must_beat_the_throughput_of_the_run():
    """Fewer drafts are proposed if the run is already fast."""
    slow, fast = AdaptiveGamma(EXPENSIVE), AdaptiveGamma(EXPENSIVE)
    for _ in range(50):
        fast.learn(matches(*[9] * 8), 8)
    assert fast.rate > 2 > slow.rate == 1
    assert fast.best(matches(4, 4, 4, 4)) < slow.best(matches(4, 4, 4, 4))
    assert slow.proposes(matches(4)) and not fast.proposes(matches(4))


def test_a_draft_that_gains_nothing_is_neither_computed_nor_proposed():
    assert AdaptiveGamma(Costs((0.0,))).best(matches(0, 0)) == 0
    adaptive = AdaptiveGamma(Costs((0.6, 9.0)))
    assert adaptive.cost(1) == adaptive.probability(("position", 0)) * adaptive.rate
    assert not adaptive.continues([])


def test_drafts_after_the_first_rejected_one_are_no_evidence():
    adaptive = AdaptiveGamma(CHEAP)
    before = adaptive.probability(("match", 3))
    adaptive.learn(matches(2, 2, 3, 3), 1)  # the second was rejected: those after it were not tried
    assert adaptive.probability(("match", 3)) == before
    assert adaptive.probability(("match", 0)) == 0  # drawn from the seed
    assert (
        adaptive.probability(("position", 0))
        > adaptive.probability(("position", 2))
        > adaptive.probability(("position", 1))
    )


def test_costs_are_extrapolated_beyond_the_last_one():
    costs = Costs((0.1, 0.3), (("head", 0.07),))
    assert [round(costs.verify_cost(count), 6) for count in range(5)] == [0, 0.1, 0.3, 0.5, 0.7]
    assert [costs.draft_cost(kind) for kind in ("head", "model", None)] == [0.07, 0.0, 0.0]
    assert round(drafting_gamma(costs, 0.07).cost(2), 6) == 0.44
    assert AdaptiveGamma(Costs()).best(matches(1, 1)) == 2  # nothing was measured
    assert Costs.of([0.12345, -1.0, 1e9], {"head": 0.0712}) == Costs((0.123, 0.0, 1000.0), (("head", 0.071),))


class Recorder(AdaptiveGamma):
    """Records what it learns from."""

    def __init__(self, costs, **options):
        super().__init__(costs, **options)
        self.learned = []

    def learn(self, buckets, accepted, computed=0):
        self.learned.append((list(buckets), accepted))
        super().learn(buckets, accepted, computed)


def test_the_ngram_drafter_learns_how_many_of_its_drafts_were_accepted():
    storage, plan, recorder = NGramStorage(3, 64), Decoding.of(None, 9, end_ids=None, seed=0), Recorder(Costs((0.0,)))
    drafter = NGramDrafter(storage, plan.noise, filler_top_k=1, adaptive=recorder)
    drafter.begin([5, 6, 7, 8, 5, 6], [5, 6, 7, 8, 5, 6])
    draft = drafter.propose([5, 6, 7, 8, 5, 6], 3)
    assert draft.tokens == [7, 8, 5]
    drafter.commit([5, 6, 7, 8, 5, 6, 7, 8, 9], Verified(6, None, None))  # type: ignore[arg-type]
    assert recorder.learned == [(matches(2, 2, 2), 2)]


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        pytest.param(rule, kind, marks=() if kind == ("head" if rule == "coupled" else "model") else pytest.mark.full)
        for rule in RULE_NAMES
        for kind in ("model", "head")
    ],
)
def test_a_model_drafter_learns_from_every_round(rule, kind):
    target, plan, recorder = (
        tiny_llama(vocab_size=8),
        Decoding.of(MultinomialProcessor(1.0), 30, end_ids=None, seed=3),
        Recorder(Costs((0.02,), (("toy", 0.02),)), kind="toy"),
    )
    shares = RULES[rule].shares_noise
    if kind == "model":
        session, drafter = (
            ModelSession(target),
            ModelDrafter(ModelSession(tiny_llama(1, vocab_size=8)), plan, 8, shares_noise=shares, adaptive=recorder),
        )
    else:
        model = tiny_head(target, vocabulary=range(8))
        session = ModelSession(target, features=model.feature_layers)
        drafter = HeadDrafter(HeadSession(model), plan, 8, shares_noise=shares, adaptive=recorder)
    steps = list(speculative_steps([1, 2, 3], drafter, session, plan, gamma=6, rule=RULES[rule]))
    assert [(len(buckets), accepted) for buckets, accepted in recorder.learned] == [
        (len(step.drafted), step.accepted) for step in steps
    ]
    assert len({len(step.drafted) for step in steps}) > 1 and sum(step.accepted for step in steps)


@pytest.mark.parametrize("seed", range(2))
def test_the_number_of_drafts_does_not_change_the_text(seed):
    model = tiny_llama(num_hidden_layers=1)
    plan = Decoding.of(None, 40, end_ids=None, seed=seed)

    def run(adaptive):
        drafter = NGramDrafter(NGramStorage(3, 64), plan.noise, adaptive=adaptive)
        steps = list(speculative_steps([1, 2, seed], drafter, ModelSession(model), plan, gamma=6))
        return tokens_of(steps), sum(len(step.drafted) for step in steps)

    fixed, expensive, cheap = run(None), run(AdaptiveGamma(EXPENSIVE)), run(AdaptiveGamma(CHEAP))
    assert fixed[0] == expensive[0] == cheap[0]
    assert expensive[1] <= cheap[1] < fixed[1] and cheap[1] > 0


@pytest.mark.parametrize(
    ("rule", "processor"), [(name, GreedyProcessor()) for name in RULE_NAMES] + [("coupled", MultinomialProcessor(1.0))]
)
def test_the_same_costs_give_the_same_drafts_and_no_costs_change_the_text(rule, processor):
    target, other = (tiny_llama(seed, vocab_size=8, num_hidden_layers=1) for seed in range(2))
    plan = Decoding.of(processor, 24, end_ids=None, seed=5)
    expected = tokens_of(autoregressive_steps([1, 2, 3], ModelSession(target, rewinds=False), plan))

    def run(costs):
        adaptive = drafting_gamma(costs, 0.05)
        drafter = ModelDrafter(ModelSession(other), plan, 8, shares_noise=RULES[rule].shares_noise, adaptive=adaptive)
        return list(speculative_steps([1, 2, 3], drafter, ModelSession(target), plan, gamma=8, rule=RULES[rule]))

    first, again, expensive = run(CHEAP), run(CHEAP), run(EXPENSIVE)
    assert tokens_of(first) == tokens_of(expensive) == expected
    assert first == again != expensive


def test_drafters_of_a_chain_share_the_throughput_estimate():
    """The second is not used if the first drafts. A round in which neither drafts counts once."""
    second = drafting_gamma(CHEAP, 0.1)
    first = AdaptiveGamma(CHEAP, rival=second)
    first.learn(matches(3, 3), 2)
    alone = ThroughputEstimate()
    alone.add(3, 1.1)
    assert first.rate == second.rate == alone.rate > 1
    first.learn([], 0)  # declined: the second was used
    assert first.rate == alone.rate
    second.learn([("confidence", 5)], 1, computed=2)
    alone.add(2, 1 + 0.05 + 0.2)
    assert first.rate == alone.rate
    second.learn([], 0, computed=1)  # a draft was computed but not proposed
    alone.add(1, 1 + 0.1)
    assert first.rate == alone.rate


def test_drafts_of_a_chain_are_worth_more_than_those_of_the_other_drafter() -> None:
    rival, positions = drafting_gamma(EXPENSIVE, 0.1), [("position", place) for place in range(8)]
    first, alone = AdaptiveGamma(EXPENSIVE, rival=rival), AdaptiveGamma(EXPENSIVE)
    alone._throughput = rival._throughput

    def expected() -> float:
        return max(value(rival, positions[:count]) for count in range(9))

    seen = set[bool]()
    for accepted in (4, 4, 4, 0, 0, 0, 0, 0, 0):  # of the other drafter's last round
        rival.learn(positions[:4], accepted)
        for buckets in product(matches(1, 2, 4), repeat=4):
            count = alone.best(buckets)
            yields = value(alone, buckets[:count]) <= expected()
            assert first.best(buckets) == (0 if yields else count)
            if count:
                seen.add(yields)
    assert seen == {False, True}


def test_an_unused_drafter_learns_nothing():
    target, plan, recorder = (
        tiny_llama(vocab_size=8),
        Decoding.of(None, 30, end_ids=None, seed=0),
        Recorder(Costs((0.02,))),
    )
    model = ModelDrafter(ModelSession(tiny_llama(1, vocab_size=8)), plan, 8, adaptive=recorder)
    first = MatchDrafter(SuffixAutomaton())
    steps = list(speculative_steps([1, 2, 3, 1, 2], ChainDrafter(first, model), ModelSession(target), plan, gamma=4))
    assert 0 < len(recorder.learned) < len(steps)
