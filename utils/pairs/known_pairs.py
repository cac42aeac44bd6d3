"""The named pairs of `--pair`: one table, a row per pair, read without importing torch so that `--help` stays fast.

What the words of a row mean (a hub id, `embedded`, `layers:K`) is loading.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairSpec:
    """A target and the drafter that goes with it, as the command line would spell them.

    cuda_quantize: how the weights of both are stored on a CUDA device, where no flag says otherwise.
    """

    target: str
    drafter: str | None
    summary: str
    cuda_quantize: str = "none"


PAIRS: dict[str, PairSpec] = {
    "embedded": PairSpec("embedded", "head", "SmolLM2-135M-Instruct with a head made for it: no hub, no GPU"),
    "llama-3.2": PairSpec(
        "meta-llama/Llama-3.2-3B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "the classic pair; gated, about 9 GB",
        "int8",
    ),
    "smollm2": PairSpec(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "open, about 4 GB"
    ),
    "qwen3": PairSpec("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "open, many languages, about 10 GB"),
}
