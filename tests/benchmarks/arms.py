"""The arms of the benchmark: our strategies, and transformers' own `generate` in the same process on the same weights.

Every arm decodes greedily and records when its first tokens arrived, so that prefill and decoding can be separated.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from utils.comparison.harness import Harness
from utils.comparison.strategies import STRATEGIES, Strategy
from utils.comparison.warm_up import with_costs
from utils.config.settings import Settings
from utils.config.value_types import StorageSpec
from utils.engine import threads
from utils.engine.forward_timing import ForwardProbe
from utils.metrics.results import collect
from utils.models.load_errors import quiet
from utils.pairs.pair import Pair
from utils.pairs.request import LOADED

NGRAM_DRAFTS = 10  # maximum n-gram drafts per round, ours and those of prompt lookup
STORAGE = StorageSpec("basic", 4)
MIN_RATE_TOKENS = 4  # fewer decoded tokens give no rate


@dataclass(frozen=True, slots=True)
class Run:
    """The result of an arm.

    seconds: of the whole run. first, first_seconds: number of the first tokens, and time until they arrived.
    drafts: number of drafts of each round.
    """

    tokens: list[int]
    seconds: float
    first: int
    first_seconds: float
    drafts: tuple[int, ...] = ()

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first ones; None if they are too few."""
        decoded = len(self.tokens) - self.first
        return decoded / (self.seconds - self.first_seconds) if decoded >= MIN_RATE_TOKENS else None

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.tokens) / self.seconds


@dataclass(frozen=True, slots=True)
class Arm:
    """A name, the number of threads, and a function from prompt ids and a length to a Run."""

    name: str
    threads: int
    generate: Callable[[list[int], int], Run]

    def run(self, ids: list[int], length: int) -> Run:
        torch.set_num_threads(self.threads)
        return self.generate(ids, length)


def our_arms(pair: Pair, gammas: Sequence[int] = (), kinds: Sequence[str] = ()) -> list[Arm]:
    """Target-only, n-gram assisted and speculative decoding, as the program runs them.

    gammas, kinds: further speculative arms, with a fixed number of drafts or with a different drafter kind.
    """
    settings = Settings(drafter_kind=(LOADED, *kinds))
    costs = with_costs(Harness.of(pair, settings), settings).costs
    strategies = {strategy.name: strategy for strategy in STRATEGIES}
    # top_k_filler=1 stores the text only, which is what prompt lookup drafts from.
    ngram = Settings(costs=costs, ngram_storage=STORAGE, top_k_filler=1)
    speculative = {"ours speculative": Settings(costs=costs)}
    speculative |= {f"ours gamma {gamma}": Settings(gamma=gamma) for gamma in gammas}
    speculative |= {f"ours {kind}": Settings(costs=costs, drafter_kind=(kind,)) for kind in kinds}
    return [
        _our_arm("ours target", pair, strategies["target"], Settings(costs=costs)),
        _our_arm("ours ngram", pair, strategies["ngram"], ngram),
        *(_our_arm(name, pair, strategies["speculative"], chosen) for name, chosen in speculative.items()),
    ]


def _our_arm(name: str, pair: Pair, strategy: Strategy, settings: Settings) -> Arm:
    variant = strategy.variants(settings.drafter_kind, pair)[0]
    harness = Harness.of(pair, settings)

    def generate(ids: list[int], length: int) -> Run:
        result = collect(variant.steps(harness.job(ids, replace(settings, length=length))))
        drafts = tuple(len(step.drafted) for step in result.steps)
        return Run(result.tokens, result.seconds, len(result.steps[0].tokens), result.first_seconds or 0.0, drafts)

    return Arm(name, pair.engine.state.threads, generate)


class _FirstTokens(StoppingCriteria):
    """Never stops generation; records the time of the first tokens and the length of the text then."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.first = self.first or (time.perf_counter(), input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool)


def peer_arms(pair: Pair) -> list[Arm]:
    """transformers' plain decoding, prompt lookup and assisted decoding, with the fastest number of threads."""
    probe = ForwardProbe(pair.target)
    count = threads.fastest_count(lambda: probe.forward(1), threads.candidate_counts())
    arms = [
        _peer_arm("generate", pair, count),
        _peer_arm("generate, prompt lookup", pair, count, prompt_lookup_num_tokens=NGRAM_DRAFTS),
    ]
    if hasattr(pair.drafter, "generate"):
        arms.append(_peer_arm("generate, assistant", pair, count, assistant_model=pair.drafter))
    return arms


def _peer_arm(name: str, pair: Any, count: int, **arguments: Any) -> Arm:
    def generate(ids: list[int], length: int) -> Run:
        prompt, clock = torch.tensor([ids]), _FirstTokens()
        with quiet():
            started = time.perf_counter()
            text = pair.target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=length,
                do_sample=False,
                eos_token_id=sorted(pair.end_ids),
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **arguments,
            )[0].tolist()
            seconds = time.perf_counter() - started
        assert clock.first is not None
        return Run(text[len(ids) :], seconds, clock.first[1] - len(ids), clock.first[0] - started)

    return Arm(name, count, generate)
