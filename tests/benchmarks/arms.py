"""The arms of the comparison: our strategies, and transformers' own `generate` in the same process on the same weights.

Every arm makes greedy text from prompt ids and says when its first tokens were there, so that prefill and decoding can be told apart.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import infer
from utils.bounds import LOADED
from utils.comparison.job import Job
from utils.comparison.strategies import STRATEGIES
from utils.comparison.warm_up import TIMED_TOKENS as MEASURED
from utils.comparison.warm_up import draft_seconds
from utils.config.settings import Settings
from utils.config.value_types import StorageSpec
from utils.engine import threads
from utils.engine.forward_timing import ForwardProbe
from utils.metrics.costs import Costs
from utils.metrics.results import collect
from utils.models.load_errors import quiet
from utils.pairs.drafter_kinds import kind_of

DRAFT = 10  # most n-gram drafts per round, ours and prompt lookup's
STORAGE = StorageSpec("basic", 4)
SHORTEST = 4  # decoded tokens that a rate can be told from


@dataclass(frozen=True, slots=True)
class Run:
    """What an arm made. seconds: all of it; first_seconds: until the first `first` tokens were there."""

    tokens: list[int]
    seconds: float
    first: int
    first_seconds: float
    drafts: tuple[int, ...] = ()  # of each round

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second behind the first ones; None where that is too little to measure."""
        made = len(self.tokens) - self.first
        return made / (self.seconds - self.first_seconds) if made >= SHORTEST else None

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.tokens) / self.seconds


@dataclass(frozen=True, slots=True)
class Arm:
    """A name, the threads to run with, and what makes a Run of prompt ids and a length."""

    name: str
    threads: int
    make: Callable[[list[int], int], Run]

    def run(self, ids: list[int], length: int) -> Run:
        torch.set_num_threads(self.threads)
        return self.make(ids, length)


def our_arms(pair: Any, gammas: Sequence[int] = (), kinds: Sequence[str] = ()) -> list[Arm]:
    """Target-only, n-gram assisted and speculative decoding, as the program runs them.

    gammas: further arms, speculative with a fixed number of drafts. kinds: further arms, of other kinds of drafters.
    """
    rows = {row.name: row for row in STRATEGIES}
    costs = costs_of(pair, kinds)
    storage = {"ngram_storage": STORAGE, "top_k_filler": 1}  # as prompt lookup: what was said, nothing else
    arms = [_our_arm(pair, rows["target"], "ours target", Settings(costs=costs))]
    arms.append(_our_arm(pair, rows["ngram"], "ours ngram", Settings(costs=costs, **storage)))
    arms.append(_our_arm(pair, rows["speculative"], "ours speculative", Settings(costs=costs)))
    arms += [_our_arm(pair, rows["speculative"], f"ours gamma {gamma}", Settings(gamma=gamma)) for gamma in gammas]
    arms += [
        _our_arm(pair, rows["speculative"], f"ours {kind}", Settings(costs=costs, drafter_kind=(kind,)))
        for kind in kinds
    ]
    return arms


def costs_of(pair: Any, kinds: Sequence[str] = ()) -> Costs:
    """The table that the program measures when it starts."""
    steps = {}
    for word in (LOADED, *kinds):
        kind, settings = kind_of(word, infer.DRAFTERS), Settings(gamma=MEASURED, length=MEASURED)
        seconds = draft_seconds(Job([0, 0, 0, 0], pair, settings, None, drafter=word), kind)
        steps[pair.drafter_kind if word == LOADED else word] = seconds / pair.engine.step_seconds
    return Costs.of(pair.engine.costs, steps)


def _our_arm(pair: Any, row: Any, name: str, settings: Settings) -> Arm:
    strategy = row.variants(settings.drafter_kind, pair)[0]

    def make(ids: list[int], length: int) -> Run:
        now = replace(settings, length=length)
        made = collect(strategy.steps(Job(ids, pair, now, infer.make_storage(now, pair.target.config.vocab_size))))
        drafts = tuple(len(step.drafted) for step in made.steps)
        return Run(made.tokens, made.seconds, len(made.steps[0].tokens), made.first_seconds or 0.0, drafts)

    return Arm(name, pair.engine.state.threads, make)


class _Clock(StoppingCriteria):
    """Never stops anything: notes when the first tokens were there, and how many."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.first = self.first or (time.perf_counter(), input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool)


def peer_arms(pair: Any) -> list[Arm]:
    """transformers' plain decoding, prompt lookup and assisted decoding, with as many threads as help them here."""
    pace = ForwardProbe(pair.target)
    count = threads.fastest_count(lambda: pace.forward(1), threads.candidate_counts())
    return [
        _peer_arm("generate", pair, count),
        _peer_arm("generate, prompt lookup", pair, count, prompt_lookup_num_tokens=DRAFT),
        *(
            [_peer_arm("generate, assistant", pair, count, assistant_model=pair.drafter)]
            if hasattr(pair.drafter, "generate")
            else []
        ),
    ]


def _peer_arm(name: str, pair: Any, count: int, **arguments: Any) -> Arm:
    def make(ids: list[int], length: int) -> Run:
        prompt, clock = torch.tensor([ids]), _Clock()
        with quiet():
            began = time.perf_counter()
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
            seconds = time.perf_counter() - began
        assert clock.first is not None
        return Run(text[len(ids) :], seconds, clock.first[1] - len(ids), clock.first[0] - began)

    return Arm(name, count, make)
