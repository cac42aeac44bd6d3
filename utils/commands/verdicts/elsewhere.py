"""Equivalent settings for transformers' generate, vLLM and llama.cpp.

Option names: transformers 5.23 (`num_assistant_tokens` is read from the assistant's generation config), vLLM's
speculative_config with the methods draft_model, ngram and suffix, and llama.cpp's --spec-* options of 2026, which
replaced --draft-max. A drafter without an equivalent is reported as such.
"""

import json
from collections.abc import Sequence

from utils.pairs.request import LAYERS, MODEL

MATCH = 2  # shortest match of `lookup`, in tokens
NONE = "no equivalent"


def equivalents(kind: str, gamma: int, *, drafter: str, same_tokenizer: bool) -> list[tuple[str, str]]:
    """Pairs of a program and its settings. `kind` is the drafter kind as in records, `gamma` a number of drafts."""
    return [
        ("transformers", _transformers(kind, gamma, drafter, same_tokenizer)),
        ("vLLM", _vllm(kind, gamma, drafter, same_tokenizer)),
        ("llama.cpp", _llama_cpp(kind, gamma)),
    ]


def _transformers(kind: str, gamma: int, drafter: str, same_tokenizer: bool) -> str:
    if kind == MODEL:
        tokenizers = "" if same_tokenizer else ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer"
        # The heuristic schedule and the confidence threshold would change the number of drafts.
        return (
            f"assistant = AutoModelForCausalLM.from_pretrained({json.dumps(drafter)}); "
            f"assistant.generation_config.update(num_assistant_tokens={gamma}, "
            'num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0); '
            f"model.generate(**inputs, assistant_model=assistant{tokenizers})"
        )
    if kind.startswith(LAYERS):
        return f"model.generate(**inputs, assistant_early_exit={kind.removeprefix(LAYERS)})"
    if kind == "lookup":
        return f"model.generate(**inputs, prompt_lookup_num_tokens={gamma}, max_matching_ngram_size={MATCH})"
    return NONE


def _vllm(kind: str, gamma: int, drafter: str, same_tokenizer: bool) -> str:
    config: dict[str, object]
    if kind == MODEL:
        config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": gamma}
        if not same_tokenizer:
            config["use_heterogeneous_vocab"] = True
    elif kind == "lookup":
        config = {
            "method": "ngram",
            "num_speculative_tokens": gamma,
            "prompt_lookup_min": MATCH,
            "prompt_lookup_max": 4,
        }
    elif kind == "suffix":
        config = {"method": "suffix", "num_speculative_tokens": gamma}
    else:
        return NONE
    return f"--speculative-config '{json.dumps(config)}'"


def _llama_cpp(kind: str, gamma: int) -> str:
    if kind == MODEL:
        return f"--model-draft DRAFTER.gguf --spec-type draft-simple --spec-draft-n-max {gamma}"
    if kind == "lookup":
        sizes = f"--spec-ngram-simple-size-n {MATCH} --spec-ngram-simple-size-m {gamma}"
        return f"--spec-type ngram-simple {sizes}"
    return NONE


def equivalent_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each program, or one line for all programs without an equivalent."""
    lines = [f"{program}: {text}" for program, text in rows if text != NONE]
    without = [program for program, text in rows if text == NONE]
    return [*lines, *([f"{', '.join(without)}: {NONE} of this drafter"] if without else [])]
