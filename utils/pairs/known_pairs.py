"""The table of pairs that `--pair` and /load know by name.

It is read without importing torch, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairSpec:
    """A target and a drafter as they are written on the command line.

    cuda_quantize: quantization of both on a CUDA device, unless a flag sets it. is_tried: whether it was ever loaded
    with this program.
    """

    target: str
    drafter: str | None
    summary: str
    cuda_quantize: str = "none"
    is_tried: bool = True


def _published(target: str, drafter: str, summary: str) -> PairSpec:
    """A drafter that was published for a target. There was no hub connection where this was built."""
    return PairSpec(target, drafter, summary, is_tried=False)


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
    "qwen3-1.7b-eagle3": _published("Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3", "EAGLE-3"),
    "qwen3-4b-eagle3": _published("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3", "EAGLE-3"),
    "qwen3-8b-eagle3": _published("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3", "EAGLE-3"),
    "qwen3-14b-eagle3": _published("Qwen/Qwen3-14B", "AngelSlim/Qwen3-14B_eagle3", "EAGLE-3"),
    "qwen3-4b-ttt7": _published("Qwen/Qwen3-4B", "deepseek-ai/eagle3_qwen3_4b_ttt7", "EAGLE-3"),
    "qwen3-8b-ttt7": _published("Qwen/Qwen3-8B", "deepseek-ai/eagle3_qwen3_8b_ttt7", "EAGLE-3"),
    "qwen3-14b-ttt7": _published("Qwen/Qwen3-14B", "deepseek-ai/eagle3_qwen3_14b_ttt7", "EAGLE-3"),
    "qwen3-8b-peagle": _published("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.peagle", "P-EAGLE"),
    "qwen3-4b-dspark": _published("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", "DSpark"),
    "qwen3-8b-dspark": _published("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", "DSpark"),
    "qwen3-14b-dspark": _published("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", "DSpark"),
    "qwen3-4b-pard": _published("Qwen/Qwen3-4B", "amd/PARD-Qwen3-0.6B", "PARD"),
    "llama-3.1-pard": _published("meta-llama/Llama-3.1-8B-Instruct", "amd/PARD-Llama-3.2-1B", "PARD, gated target"),
    "gemma-4-e2b": _published("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant", "assistant of Gemma 4"),
    "gpt-oss-20b-peagle": _published("openai/gpt-oss-20b", "amazon/gpt-oss-20b-p-eagle", "P-EAGLE"),
    "gpt-oss-20b-eagle3": _published("openai/gpt-oss-20b", "Dogacel/specdrift-gpt-oss-20b-eagle3", "EAGLE-3.1"),
}
