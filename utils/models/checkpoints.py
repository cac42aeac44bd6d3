"""Load one checkpoint: its model, in evaluation mode, and its tokenizer.

The policy is fixed here: only safetensors and GGUF, no remote code, no gradients, no missing weights. Which two
checkpoints make a pair is decided in `utils.pairs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
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

from utils.decode.generation_rules import GenerationRules
from utils.errors import UserError
from utils.models.devices import Placement
from utils.models.file_model import load_from_files
from utils.models.hub import verified_download
from utils.models.load_checks import check_causal, check_complete, check_finite, check_limits, check_runs
from utils.models.load_errors import explained_errors, quiet
from utils.models.memory import MemoryPlan, plan_memory
from utils.models.progress import counted_seconds
from utils.models.quantization import check_not_quantized, quantization_arguments, quantize_loaded
from utils.models.sources import Source, found_file, has_tokenizer
from utils.text import byte_size


def load_model(source: Source, kind: str, where: Placement, *, drafts_with: str = "") -> PreTrainedModel:
    """Load a model in a kind of quantization, one of QUANTIZATIONS. Raises UserError for anything that goes wrong.

    drafts_with: what the names of tensors in its files begin with that its drafter reads; empty for none.
    """
    plan_memory(source, kind, where, in_files=True)  # before anything is downloaded: the least that it can need
    with _loading(source):
        _check_generation_config(source)
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
        check_not_quantized(config, kind, source.name)
        if kind == "none" and (stored := load_from_files(source, config, where)) is not None:
            check_limits(stored.model, source.name)
            GenerationRules.of(stored.model)
            _report_unused(source, stored.unused, where, drafts_with)
            return stored.model
        plan = plan_memory(source, kind, where)
        where.report(_progress_line(source, kind, where, plan))
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        # Downloads and conversions have progress bars of their own.
        has_bar = source.hub_arguments is not None or source.gguf
        with nullcontext() if has_bar else counted_seconds(where.report, f"loading {source.name}"):
            model, loading_info = auto.from_pretrained(
                source.location,
                config=config,  # reading it again would take seconds for a GGUF file
                dtype=where.dtype,
                use_safetensors=True,
                output_loading_info=True,
                **source.arguments,
                **_format_arguments(source, kind, where.dtype),
                device_map=device_map(where, plan),
            )
        model.name_or_path = source.name  # for messages; the config keeps the location
        # Weights are checked before they are quantized: integers cannot be NaN any more. What runs is checked after.
        check_complete(model, loading_info, source.name)
        check_finite(model, source.name)
        quantize_loaded(model, kind, source.name)
        GenerationRules.of(model)  # raises UserError for rules that are not valid
        check_runs(model, source.name)
        check_causal(model, source.name)
    _report_unused(source, sorted(loading_info["unexpected_keys"]), where, drafts_with)
    # Without gradients, no caller that forgets no_grad can build up a graph over a whole run.
    return model.eval().requires_grad_(False)


def _report_unused(source: Source, names: list[str], where: Placement, drafts_with: str) -> None:
    """Not an error: a multimodal checkpoint, for example, holds parts that a text model does not have."""
    if unused := [name for name in names if not drafts_with or not name.startswith(drafts_with)]:
        where.report(f"{source.name}: {len(unused)} of the weights in its files are not used ({unused[0]}, ...)")


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer. Returns None if the checkpoint has none. Raises UserError if its files are damaged."""
    with _loading(source):
        if not has_tokenizer(source):
            return None
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments)
        tokenizer("Hello")  # some fail only here
        return tokenizer


def remote_code_notes(model: PreTrainedModel, name: str) -> tuple[str, ...]:
    """Return a note for a repository that contains code, in case the user expects it to be run."""
    if getattr(model.config, "auto_map", None):
        return (f"{name} contains Python code of its own: it is not run, the class of transformers is used",)
    return ()


def device_map(where: Placement, plan: MemoryPlan) -> str | dict[str, str]:
    """Return the argument that tells `from_pretrained` where to load."""
    # With "auto", accelerate moves activations from layer to layer. Otherwise the model is loaded directly to the
    # device, without a second copy in main memory.
    return "auto" if plan.spread else {"": where.device}


@contextmanager
def _loading(source: Source) -> Iterator[None]:
    """Silence the libraries, turn exceptions into UserErrors, and verify what is downloaded."""
    verified = nullcontext() if source.hub_arguments is None else verified_download(source.location)
    # verified_download is the innermost, so the UserError for a damaged file passes through explained_errors unchanged.
    with explained_errors(source.name), quiet(), verified:
        yield


def _check_generation_config(source: Source) -> None:
    """Refuse a damaged generation_config.json.

    transformers ignores it, and then texts end at other tokens, and no token is forbidden.
    """
    path = found_file(source, "generation_config.json")
    if source.gguf or path is None:
        return
    try:
        valid = isinstance(json.loads(Path(path).read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        valid = False
    if not valid:
        raise UserError(
            f"'{source.name}' has a damaged generation_config.json: fetch or copy it again, or delete it; then "
            "config.json alone says where texts end."
        )


def _progress_line(source: Source, kind: str, where: Placement, plan: MemoryPlan) -> str:
    device = "all GPUs and the CPU, because one GPU is too small" if plan.spread else where.device
    size = byte_size(plan.needed) if plan.needed else ""
    words = (device, str(where.dtype).removeprefix("torch."), "" if kind == "none" else kind, size)
    return f"loading {source.name} ({', '.join(filter(None, words))}) ..."


def _format_arguments(source: Source, kind: str, dtype: torch.dtype | str) -> dict[str, Any]:
    # Without `dequantize`, a GGUF model keeps its packed blocks, which nothing else here can use.
    return {"quantization_config": GgufConfig(dequantize=True)} if source.gguf else quantization_arguments(kind, dtype)
