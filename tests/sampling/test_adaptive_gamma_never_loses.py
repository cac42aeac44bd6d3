"""Adaptive gamma never loses: simulated times of whole runs, from tables of costs and acceptance rates.

A run takes its prefill, its verify passes, its drafts, and the drafter's reading of the prompt. Every draft is accepted
with the same probability, whatever the drafter's confidence says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import pytest

from sampling import AdaptiveGamma
from sampling.drafters.adaptive_gamma import Bucket
from utils.bounds import AUTO_GAMMA
from utils.metrics.costs import Costs

KIND = "head"
RATES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
BAR = 0.97


def table(verify: list[float], draft: float, read: float, *, grown: float, step: float) -> Costs:
    """grown: how many times the costs of verify passes are higher after 1,064 tokens, where a step takes `step`."""
    longer = Costs.of([grown * cost for cost in verify], {KIND: draft / step}, length=1064, step=step)
    return Costs.of(verify, {KIND: draft}, {KIND: read}, length=64, longer=longer)


STEPPED = [0.48, 0.22, 0.32, 0.42, 0.53, 0.63, 0.74, 0.84, *(0.84 + 0.053 * more for more in range(1, 9))]
FLAT = [0.07, 0.16, 0.23, 0.3, 0.43, 0.55, 0.68, 0.8, *(0.8 + 0.19 * more for more in range(1, 9))]
STEEP = [0.81, 1.33, 1.4, 1.47, 1.53, 1.6, 1.67, 1.74, *(1.74 + 0.19 * more for more in range(1, 9))]
COSTS = {
    "head, packed weights": table(STEPPED, 0.07, 2.0, grown=1.6, step=1.1),
    "head, int8": table(FLAT, 0.06, 5.0, grown=1.5, step=1.1),
    "model, int8": table(FLAT, 0.25, 20.0, grown=1.5, step=1.1),
    "head, plain": table(STEEP, 0.07, 5.0, grown=1.2, step=1.1),
    "model, GPU": table([0.02] * 16, 0.2, 0.5, grown=1.0, step=1.05),
}


@dataclass
class Toy:
    """A run by its acceptance rate. confidence: the bucket of every draft. prompt: its tokens. tokens: of the answer.

    time: so far, in decode steps of a short context. read: tokens that the drafter has read. drafts: how many were
    computed.
    """

    costs: Costs
    rate: float
    confidence: int
    prompt: int
    tokens: int
    seed: int
    time: float = 0.0
    read: int = 0
    drafts: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.prefill = self.costs.prefill_cost(self.prompt)

    def step(self, length: int) -> float:
        longer = self.costs.longer
        assert longer is not None
        return 1 + (longer.step - 1) * max(0.0, (length - self.costs.length) / (longer.length - self.costs.length))

    @property
    def alone(self) -> float:
        """The time of the target alone."""
        return self.prefill + sum(self.step(self.prompt + made) for made in range(self.tokens))

    def round(self, made: int, proposed: int, computed: int) -> int:
        """Verify so many drafts, and return how many are accepted."""
        length = self.prompt + made
        costs = self.costs.at(length)
        self.time += self.step(length) * (1 + costs.verify_cost(proposed) + computed * costs.draft_cost(KIND))
        if computed:
            self.time += self.step(length) * costs.reading_cost(KIND, length - self.read)
            self.read = length
        self.drafts += computed
        accepted = 0
        while accepted < proposed and self.random.random() < self.rate:
            accepted += 1
        return accepted

    def adaptive(self, max_new: int) -> float:
        """The speed-up of adaptive gamma, which drafts as ModelDrafter does."""
        gamma, made = AdaptiveGamma(self.costs, kind=KIND, max_new=max_new), 0
        gamma.begin([0] * self.prompt, [0] * self.prompt)
        self.time = self.prefill
        while made < self.tokens:
            gamma.follow([0] * (self.prompt + made))
            buckets: list[Bucket] = []
            computed, most = 0, min(AUTO_GAMMA, max_new - made - 1)
            while len(buckets) < most and gamma.continues(buckets):
                computed += 1
                buckets.append(("confidence", self.confidence))
                if not gamma.proposes(buckets):
                    buckets.pop()
                    break
            accepted = self.round(made, len(buckets), computed)
            gamma.learn(buckets, accepted, computed)
            made += accepted + 1
        return self.alone / self.time

    def fixed(self, drafts: int) -> float:
        """The speed-up of a fixed gamma."""
        made, self.time = 0, self.prefill
        while made < self.tokens:
            count = min(drafts, self.tokens - made - 1)
            made += self.round(made, count, count) + 1
        return self.alone / self.time


def confidences(rate: float) -> set[int]:
    """Of a drafter that knows itself, and of one that is always sure."""
    return {min(7, int(8 * rate)), 7}


def speedup(max_new: int, runs: int = 6, **values: Any) -> float:
    """Of several runs as a whole, as a benchmark counts them."""
    toys = [Toy(seed=seed, **values) for seed in range(runs)]
    for toy in toys:
        toy.adaptive(max_new)
    return sum(toy.alone for toy in toys) / sum(toy.time for toy in toys)


def best_fixed(runs: int = 6, **values: Any) -> float:
    """The speed-up of the best fixed gamma, which nobody knows in advance."""
    return max(fmean(Toy(seed=seed, **values).fixed(gamma) for seed in range(runs)) for gamma in range(9))


def mixed(costs: Costs, prompt: int, tokens: int, **others: Any) -> dict[str, Any]:
    return {"costs": costs, "prompt": prompt, "tokens": tokens, **others}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("prompt", [50, *(pytest.param(prompt, marks=pytest.mark.full) for prompt in (1000, 3000))])
def test_no_run_is_slower_than_the_target_alone(name: str, prompt: int) -> None:
    """Also a run that ends long before the maximum number of new tokens, and whatever the drafter thinks of itself."""
    for (tokens, max_new), rate in product(((48, 48), (48, 256), (256, 256)), RATES):
        for confidence in confidences(rate):
            values = mixed(COSTS[name], prompt, tokens, rate=rate, confidence=confidence)
            assert speedup(max_new, runs=2, **values) >= BAR, (tokens, max_new, rate, confidence)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        pytest.param(name, rate, marks=pytest.mark.full if (row + column) % 2 else ())
        for row, name in enumerate(["head, packed weights", "head, int8", "model, GPU"])
        for column, rate in enumerate([0.5, 0.7, 0.9])
    ],
)
def test_where_drafts_pay_it_is_near_the_best_fixed_gamma(name: str, rate: float) -> None:
    """The share is that of the gain of a long answer: what remains is the time in which acceptance is learned."""
    values = mixed(COSTS[name], 50, 256, rate=rate)
    best = best_fixed(**values, confidence=7)  # whatever the drafter thinks of itself
    for confidence in confidences(rate):
        assert speedup(256, **values, confidence=confidence) > 1 + 0.6 * (best - 1), confidence


def test_a_long_prompt_is_read_where_the_answer_is_long_enough_to_pay_for_it() -> None:
    values = {"rate": 0.9, "confidence": 7, "seed": 0}
    for prompt, tokens, reads in ((1000, 256, True), (1000, 48, False), (50, 48, True)):
        toy = Toy(**mixed(COSTS["head, int8"], prompt, tokens, **values))
        toy.adaptive(tokens)
        assert (toy.drafts > 0) is reads is (toy.read >= prompt), (prompt, tokens)


def test_a_slow_reader_does_not_draft_even_if_a_loss_is_not_bounded() -> None:
    """The reading is spread over the tokens that remain."""
    for read, tokens, drafts in ((0.1, 40, True), (40.0, 40, False), (40.0, 2000, True)):
        costs = Costs.of([0.1] * 16, {KIND: 0.1}, {KIND: read}, length=64)
        gamma = AdaptiveGamma(costs, kind=KIND, max_new=tokens)
        gamma.begin([0] * 500, [0] * 500)
        gamma._throughput.gain = 1000.0  # nothing is too dear
        assert gamma.continues([]) is drafts, (read, tokens)


def test_reading_is_paid_once() -> None:
    costs = Costs.of([0.1] * 16, {KIND: 0.1}, {KIND: 40.0}, length=64)
    gamma = AdaptiveGamma(costs, kind=KIND, max_new=2000)
    gamma.begin([0] * 500, [0] * 500)
    gamma.learn([], 0)
    assert gamma._throughput.gain == 0
    gamma.follow([0] * 501)
    gamma.learn([("confidence", 7)], 1, 1)
    assert gamma._throughput.gain == pytest.approx(2 - 1.2 - 501 * 0.04)
    gamma.follow([0] * 503)
    gamma.learn([("confidence", 7)], 1, 1)
    assert gamma._throughput.gain == pytest.approx(2 * (2 - 1.2) - 503 * 0.04)


def test_costs_follow_the_context() -> None:
    """A draft that pays in a short context does not pay in a long one."""
    longer = Costs.of([2.0] * 16, {KIND: 0.1}, length=1064)
    costs = Costs.of([0.1] * 16, {KIND: 0.1}, length=64, longer=longer)
    gamma = AdaptiveGamma(costs, kind=KIND)
    for length, drafts in ((64, True), (1064, False), (64, True)):
        gamma.follow([0] * length)
        assert gamma.continues([]) is drafts and gamma.best([("match", 3)]) == drafts


def test_a_draft_is_proposed_where_the_kernels_take_longer_for_fewer_rows() -> None:
    """A verify pass with one draft is dear, with two it is cheap: the first is a step towards the second."""
    gamma = AdaptiveGamma(Costs.of(STEPPED, {KIND: 0.07}), kind=KIND)
    for _ in range(30):
        gamma.learn([("confidence", 5)] * 3, 3, 3)
    assert gamma.rate * STEPPED[0] > gamma.probability(("confidence", 5)) > gamma.rate * STEPPED[1]
    assert gamma.proposes([("confidence", 5)])
    assert not gamma.proposes([("confidence", 5), ("confidence", 5), ("confidence", 0)])
