"""The arms of the comparison: our strategies, and transformers' own `generate` in the same process on the same weights.

Every arm makes greedy text from prompt ids and says when its first tokens were there, so that prefill and decoding can be told apart.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import infer
from utils.engine import threads
from utils.engine.pace import Pace
from utils.kinds import StorageSpec
from utils.models.failures import quiet
from utils.results import collect
from utils.settings import Settings
from utils.strategies import Job

DRAFT = 10  # most n-gram drafts per round, ours and prompt lookup's
STORAGE = StorageSpec("basic", 4)
GAMMA = 2  # drafts of the drafter per round, ours; transformers adapts its own
SHORTEST = 4  # decoded tokens that a rate can be told from


@dataclass(frozen=True, slots=True)
class Run:
    """What an arm made. seconds: all of it; first_seconds: until the first `first` tokens were there."""

    tokens: list[int]
    seconds: float
    first: int
    first_seconds: float

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


def our_arms(pair: Any) -> list[Arm]:
    """Target-only, n-gram assisted and speculative decoding, as the program runs them."""
    changes: dict[str, dict[str, Any]] = {
        "target": {},
        "ngram": {"gamma": DRAFT, "ngram_storage": STORAGE, "top_k_filler": 1},  # as prompt lookup: what was said, nothing else
        "speculative": {"gamma": GAMMA},
    }
    return [_our_arm(pair, row, changes[row.name]) for row in infer.STRATEGIES if row.name in changes]


def _our_arm(pair: Any, row: Any, changes: dict[str, Any]) -> Arm:
    def make(ids: list[int], length: int) -> Run:
        settings = Settings(length=length, **changes)
        storage = infer.make_storage(settings, pair.target.config.vocab_size)
        made = collect(row.steps(Job(ids, pair, settings, storage)))
        return Run(made.tokens, made.seconds, len(made.steps[0].tokens), made.first_seconds or 0.0)

    return Arm(f"ours {row.name}", pair.engine.state.threads, make)


class _Clock(StoppingCriteria):
    """Never stops anything: notes when the first tokens were there, and how many."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.first = self.first or (time.perf_counter(), input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool)


def peer_arms(pair: Any) -> list[Arm]:
    """transformers' plain decoding, prompt lookup and assisted decoding, with as many threads as help them here."""
    pace = Pace(pair.target)
    count = threads.fastest(lambda: pace.forward(1), threads.thread_counts())
    return [
        _peer_arm("generate", pair, count),
        _peer_arm("generate, prompt lookup", pair, count, prompt_lookup_num_tokens=DRAFT),
        _peer_arm("generate, assistant", pair, count, assistant_model=pair.drafter),
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
