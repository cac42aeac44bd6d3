"""llama.cpp beside the others, where llama-cpp-python is installed and a GGUF file is given: the same model, its own kernels."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arms import DRAFT, Arm, Run

from utils.engine import threads

TRIED = 24  # tokens, to find the number of threads that helps it


def arms(gguf: Path | None, pair: Any) -> list[Arm]:
    """Plain decoding and prompt lookup; none where llama.cpp or the file is missing."""
    if gguf is None or find_spec("llama_cpp") is None:
        return []
    ends = pair.end_ids
    made = {count: _maker(gguf, ends, count) for count in {1, threads.available_threads()}}
    best = max(made, key=lambda count: made[count]([1, 2, 3, 4], TRIED).rate)
    return [
        Arm("llama.cpp", best, made[best]),
        Arm("llama.cpp, prompt lookup", best, _maker(gguf, ends, best, lookup=True)),
    ]


def _maker(gguf: Path, ends: frozenset[int], count: int, *, lookup: bool = False) -> Callable[[list[int], int], Run]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=DRAFT) if lookup else None
    model = Llama(
        str(gguf),
        n_ctx=8192,
        n_threads=count,
        n_threads_batch=count,
        verbose=False,
        draft_model=draft,
        logits_all=lookup,
    )

    def make(ids: list[int], length: int) -> Run:
        tokens: list[int] = []
        model.reset()
        began, first = time.perf_counter(), 0.0
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0, reset=False):
            first = first or time.perf_counter() - began
            tokens.append(token)
            if token in ends or len(tokens) == length:
                break
        return Run(tokens, time.perf_counter() - began, 1, first)

    return make
