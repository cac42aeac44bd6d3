"""The table of pairs that `--pair` and /load know by name.

It is read without importing torch, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairSpec:
    """A target and a drafter as they are written on the command line.

    cuda_quantize: quantization of both on a CUDA device, unless a flag sets it.
    """

    target: str
    drafter: str | None
    summary: str
    cuda_quantize: str = "none"


PAIRS: dict[str, PairSpec] = {
    "embedded": PairSpec("embedded", "head", "SmolLM2-135M-Instruct with a head trained for it, no hub, no GPU"),
    "llama-3.2": PairSpec(
        "meta-llama/Llama-3.2-3B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "a common pair in the literature, gated, about 9 GB",
        "int8",
    ),
    "smollm2": PairSpec(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "open, about 4 GB"
    ),
    "qwen3": PairSpec("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "open, many languages, about 10 GB"),
}
