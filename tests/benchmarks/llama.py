"""llama.cpp as a peer, if llama-cpp-python is installed and a GGUF file of the same model is given."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from arms import NGRAM_DRAFTS, Arm, Run

from utils.engine import threads
from utils.pairs.pair import Pair

TRIAL_TOKENS = 24  # of a run that chooses the number of threads


def arms(gguf: Path | None, pair: Pair) -> list[Arm]:
    """Plain decoding and prompt lookup; no arms if llama-cpp-python or the file is missing."""
    if gguf is None or find_spec("llama_cpp") is None:
        return []
    ends = pair.end_ids
    plain = {count: _generator(gguf, ends, count) for count in {1, threads.available_threads()}}
    best = max(plain, key=lambda count: plain[count]([1, 2, 3, 4], TRIAL_TOKENS).rate)
    return [
        Arm("llama.cpp", best, plain[best]),
        Arm("llama.cpp, prompt lookup", best, _generator(gguf, ends, best, lookup=True)),
    ]


def _generator(
    gguf: Path, ends: frozenset[int], count: int, *, lookup: bool = False
) -> Callable[[list[int], int], Run]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    model = Llama(
        str(gguf),
        n_ctx=8192,
        n_threads=count,
        n_threads_batch=count,
        verbose=False,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=NGRAM_DRAFTS) if lookup else None,
        logits_all=lookup,
    )

    def generate(ids: list[int], length: int) -> Run:
        tokens: list[int] = []
        model.reset()
        started, first_seconds = time.perf_counter(), 0.0
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0, reset=False):
            first_seconds = first_seconds or time.perf_counter() - started
            tokens.append(token)
            if token in ends or len(tokens) == length:
                break
        return Run(tokens, time.perf_counter() - started, 1, first_seconds)

    return generate
