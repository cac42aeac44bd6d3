"""llama.cpp beside the others, where llama-cpp-python is installed and a GGUF file is given: the same model, its own kernels."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arms import DRAFT, Arm, Run

from utils.engine import threads


def arms(gguf: Path | None, pair: Any) -> list[Arm]:
    """Plain decoding and prompt lookup; none where llama.cpp or the file is missing."""
    if gguf is None or find_spec("llama_cpp") is None:
        return []
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    count = threads.available_threads()  # its kernels share their work among all of them
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=DRAFT)
    made = []
    for name, draft in (("llama.cpp", None), ("llama.cpp, prompt lookup", lookup)):
        model = Llama(
            str(gguf), n_ctx=8192, n_threads=count, n_threads_batch=count, verbose=False, draft_model=draft, logits_all=draft is not None
        )
        made.append(Arm(name, count, _make(model, pair)))
    return made


def _make(model: Any, pair: Any) -> Any:
    def make(ids: list[int], length: int) -> Run:
        tokens: list[int] = []
        model.reset()
        began, first = time.perf_counter(), 0.0
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0, reset=False):
            first = first or time.perf_counter() - began
            tokens.append(token)
            if token in pair.end_ids or len(tokens) == length:
                break
        return Run(tokens, time.perf_counter() - began, 1, first)

    return make
