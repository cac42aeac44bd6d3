"""The arms of the benchmark: what generates a text from prompt ids, and how long that took. Here are our own.

Every arm decodes greedily and records when its first tokens arrived, so that prefill and decoding can be separated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from utils.comparison.harness import Harness
from utils.comparison.strategies import STRATEGIES, Strategy
from utils.comparison.warm_up import with_costs
from utils.config.settings import Settings
from utils.config.value_types import StorageSpec
from utils.metrics.results import collect
from utils.pairs.pair import Pair
from utils.pairs.request import LOADED

NGRAM_DRAFTS = 10  # maximum n-gram drafts per round, ours and those of prompt lookup
STORAGE = StorageSpec("basic", 4)
MIN_RATE_TOKENS = 4  # fewer decoded tokens give no rate
TARGET, NGRAM, SPECULATIVE = "ours target", "ours ngram", "ours speculative"
PLAIN = ", plain engine"  # end of the names of our arms in the plain engine


@dataclass(frozen=True, slots=True)
class Run:
    """The result of an arm.

    count: number of new tokens. seconds: of the whole run. first, first_seconds: number of the first tokens, and time
    until they arrived. tokens: the new tokens, or None from a peer that returns only `text`.
    """

    count: int
    seconds: float
    first: int
    first_seconds: float
    tokens: list[int] | None = None
    text: str = ""

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first ones; None if they are too few."""
        decoded = self.count - self.first
        return decoded / (self.seconds - self.first_seconds) if decoded >= MIN_RATE_TOKENS else None

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.count / self.seconds


@dataclass(frozen=True, slots=True)
class Arm:
    """A name, the number of threads, and a function from prompt ids and a length to a Run.

    every: the arm runs on the first of every so many prompts.
    """

    name: str
    threads: int
    run: Callable[[list[int], int], Run]
    every: int = 1


def our_arms(pair: Pair, threads: int, suffix: str = "", *, every: int = 1) -> list[Arm]:
    """Target-only, n-gram assisted and speculative decoding, as the program runs them with /gamma auto.

    threads: of PyTorch, which other pairs may have changed since. suffix: the end of their names.
    """
    torch.set_num_threads(threads)
    settings = Settings()
    costs = with_costs(Harness.of(pair, settings), settings).costs
    # top_k_filler=1 stores the text only, which is what prompt lookup drafts from.
    chosen = {
        TARGET: ("target", Settings(costs=costs)),
        NGRAM: ("ngram", Settings(costs=costs, ngram_storage=STORAGE, top_k_filler=1)),
        SPECULATIVE: ("speculative", Settings(costs=costs)),
    }
    strategies = {strategy.name: strategy for strategy in STRATEGIES}
    return [
        Arm(name + suffix, pair.engine.state.threads, _run(pair, strategies[strategy], settings, threads), every)
        for name, (strategy, settings) in chosen.items()
    ]


def _run(pair: Pair, strategy: Strategy, settings: Settings, threads: int) -> Callable[[list[int], int], Run]:
    variant = strategy.variants((LOADED,), pair)[0]
    harness = Harness.of(pair, settings)

    def run(ids: list[int], length: int) -> Run:
        torch.set_num_threads(threads)
        result = collect(variant.steps(harness.job(ids, replace(settings, length=length))))
        first = len(result.steps[0].tokens)
        return Run(len(result.tokens), result.seconds, first, result.first_seconds or 0.0, tokens=result.tokens)

    return run
