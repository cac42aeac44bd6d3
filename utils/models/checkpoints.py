"""One checkpoint into memory: its model in evaluation mode, and its tokenizer.

The policy is fixed here: safetensors or GGUF only, no remote code, no gradients, nothing missing. Which two checkpoints make a pair is
loading.py's question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from utils.caching import vocabulary_size
from utils.errors import UserError
from utils.models.embedded import Report
from utils.models.failures import explained, quiet
from utils.models.quantization import loading_arguments, quantize_loaded
from utils.models.sources import Source, has_tokenizer
from utils.rounding import Spread, most_rounding


@dataclass(frozen=True, slots=True)
class Placement:
    """Where models go, in which number format, and who hears of it."""

    device: str
    dtype: torch.dtype | str
    report: Report


def load_model(source: Source, kind: str, where: Placement) -> PreTrainedModel:
    """The model, quantized as `kind` says. Raises UserError when it cannot be had, for whatever reason."""
    quantized = "" if kind == "none" else f", {kind}"
    where.report(f"loading {source.name} ({where.device}, {str(where.dtype).removeprefix('torch.')}{quantized}) ...")
    with explained(source.name), quiet():
        config = AutoConfig.from_pretrained(source.place, **source.arguments)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model, outcome = auto.from_pretrained(
            source.place,
            config=config,  # read already, which takes seconds for a GGUF file
            dtype=where.dtype,
            device_map={"": where.device},  # straight to the device: no second copy in main memory
            use_safetensors=True,
            output_loading_info=True,
            **source.arguments,
            **_format_arguments(source, kind, where.dtype),
        )
        _check_complete(outcome, source.name)
        _check_numbers(model, source.name)
        quantize_loaded(model, kind, source.name)
        _check_causal(model, source.name)
    model.name_or_path = source.name  # what sentences call it; the config keeps the place
    return model.eval().requires_grad_(False)


def _check_numbers(model: PreTrainedModel, name: str) -> None:
    """A weight that is no number makes every law one that is none, at the first token that meets it."""
    for part, weight in model.named_parameters():
        if weight.is_floating_point() and weight.numel() and not torch.isfinite(torch.stack(weight.detach().aminmax())).all():
            raise UserError(f"'{name}' holds weights that are no numbers (NaN or infinite, in {part}): fetch or copy it again.")


def _check_causal(model: PreTrainedModel, name: str) -> None:
    """Encoders such as BERT load as text models too, and look at what comes later."""
    if model.config.is_encoder_decoder:
        return
    texts = torch.tensor([[1, 2, 3, 1], [1, 2, 3, 2]], device=model.device) % vocabulary_size(model)
    with torch.no_grad():
        logits, others = model(input_ids=texts, use_cache=False).logits[:, :-1]
    if Spread.of([logits, others]).difference > most_rounding(logits):
        raise UserError(f"'{name}' looks at what comes later, so it cannot write text: give a causal or an encoder-decoder model.")


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the checkpoint brings none. Raises UserError when its files are damaged."""
    with explained(source.name), quiet():
        return AutoTokenizer.from_pretrained(source.place, **source.arguments) if has_tokenizer(source) else None


def code_notes(model: PreTrainedModel, name: str) -> tuple[str, ...]:
    """A sentence for a repository that ships code: somebody may expect it to be run."""
    if getattr(model.config, "auto_map", None):
        return (f"{name} ships Python code of its own: it is not run, the class of transformers is used",)
    return ()


def _format_arguments(source: Source, kind: str, dtype: torch.dtype | str) -> dict[str, Any]:
    # Without `dequantize` a GGUF model keeps its packed blocks, which no other step here can use.
    return {"quantization_config": GgufConfig(dequantize=True)} if source.gguf else loading_arguments(kind, dtype)


def _check_complete(outcome: dict[str, Any], name: str) -> None:
    """transformers fills what a checkpoint lacks with random numbers and goes on."""
    if missing := sorted(outcome["missing_keys"]):
        raise UserError(f"'{name}' lacks {len(missing)} of its weights ({missing[0]}, ...): fetch or copy it again.")
