"""Adaptive gamma never loses: simulated times of whole runs, from tables of costs and acceptance rates.

A run takes its prefill, its verify passes, its drafts, and the drafter's reading of the prompt. Every draft is accepted
with the same probability, whatever the drafter's confidence says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import pytest

from sampling import AdaptiveGamma
from sampling.adaptive_gamma import Bucket
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

    time, alone: decode steps, in those of a short context, so far, and those of the target alone.
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


def toys(*chosen: int, **values: float) -> Iterator[Toy]:
    for seed in range(12):
        yield Toy(seed=seed, **values)  # type: ignore[arg-type]


def confidences(rate: float) -> set[int]:
    """A drafter that knows itself, and one that is always sure."""
    return {min(7, int(8 * rate)), 7}


def mean_speedup(max_new: int, **values: float) -> float:
    """Of several runs as a whole, as a benchmark counts them."""
    runs = [*toys(**values)]
    for run in runs:
        run.adaptive(max_new)
    return sum(run.alone for run in runs) / sum(run.time for run in runs)


def main() -> None:
    for name, costs in COSTS.items():
        for prompt, (tokens, max_new) in product((50, 1000, 3000), ((48, 48), (48, 256), (256, 256))):
            line = f"{name:22} {prompt:5} {tokens:4}/{max_new:4}:"
            for rate in RATES:
                values = {"costs": costs, "rate": rate, "prompt": prompt, "tokens": tokens}
                worst = min(mean_speedup(max_new, confidence=c, **values) for c in confidences(rate))
                best = max(
                    (fmean(run.fixed(g) for run in toys(confidence=0, **values)), g) for g in (0, 1, 2, 3, 4, 6, 8, 12)
                )
                line += f"  {worst:.3f}/{best[0]:.2f}(g{best[1]})"
            print(line)


if __name__ == "__main__":
    main()
