"""Load one checkpoint: its model, in evaluation mode, and its tokenizer.

The policy is fixed here: only safetensors and GGUF, no remote code, no gradients; and the model must be complete,
finite, causal, and able to run as the decoders will run it. Which two checkpoints make a pair is decided in
`utils.pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from utils.decode.generation_rules import GenerationRules
from utils.decode.layer_cut import first_layers, layer_kinds
from utils.decode.logit_drift import largest_difference, max_rounding
from utils.decode.model_info import vocabulary_size
from utils.decode.model_session import ModelSession
from utils.decode.sliding_window import keeps_all
from utils.engine.read_decoder import read_decoder
from utils.engine.selftest import first_logits
from utils.errors import UserError
from utils.freed_memory import release_memory
from utils.models import counted_seconds
from utils.models.file_model import check_tensor, load_from_files
from utils.models.gguf_header import read_config, read_tokenizer
from utils.models.load_errors import explained_errors, first_line, is_out_of_memory, quiet
from utils.models.memory import Placement, free_bytes, plan_memory
from utils.models.quantization import check_not_quantized, dequantized_model, quantization_arguments, quantize_loaded
from utils.models.sources import Source, has_tokenizer
from utils.text import byte_size

DRAFTS = 2  # in the verify pass of `check_runs`


def load_model(source: Source, kind: str, where: Placement, *, reads_rest: bool = False) -> PreTrainedModel:
    """Load a model in a kind of quantization, one of QUANTIZATIONS. Raises UserError for anything that goes wrong.

    `reads_rest` is True if its drafter reads tensors in its files that the model does not have.
    """
    plan_memory(source, kind, where, in_files=True)  # before anything is downloaded: the least that it can need
    with explained_errors(source.name), quiet():
        config = read_config(source)
        check_not_quantized(config, kind, source)
        if kind == "none" and (stored := _left_in_files(source, config, where)) is not None:
            model, unused = stored
            _report_unused(source, () if reads_rest else unused, where)
            return model
        (needed, spread), quantized = plan_memory(source, kind, where), quantization_arguments(kind, where.dtype)
        where.report(_progress_line(source, kind, where, needed, spread=spread))
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        # Downloads and conversions have progress bars of their own.
        has_bar = source.hub_arguments is not None or source.gguf
        with nullcontext() if has_bar else counted_seconds(where.report, f"loading {source.name}"):
            model, loading_info = dequantized_model(source, config, kind, where) or auto.from_pretrained(
                source.location,
                config=config,  # reading it again would take seconds for a GGUF file
                dtype=where.dtype,
                use_safetensors=True,
                output_loading_info=True,
                **source.arguments,
                # Without `dequantize`, a GGUF model keeps its packed blocks, which nothing else here can use.
                **({"quantization_config": GgufConfig(dequantize=True)} if source.gguf else quantized),
                # With "auto", accelerate moves activations from layer to layer. Otherwise the model is loaded directly
                # to the device, without a second copy in main memory.
                device_map="auto" if spread else {"": where.device},
            )
        model.name_or_path = source.name  # for messages; the config keeps the location
        # Weights are checked before they are quantized: integers cannot be NaN any more. What runs is checked after.
        check_complete(model, loading_info, source.name)
        for part, weight in model.named_parameters():  # NaN would make every distribution NaN that reads it
            check_tensor(weight.detach(), source.name, part)
        quantize_loaded(model, kind, source.name)
        GenerationRules.of(model)  # raises UserError for rules that are not valid
        check_runs(model, source.name, kind)
        check_causal(model, source.name)
    _report_unused(source, () if reads_rest else sorted(loading_info["unexpected_keys"]), where)
    # Without gradients, no caller that forgets no_grad can build up a graph over a whole run.
    return model.eval().requires_grad_(False)


def _report_unused(source: Source, names: Sequence[str], where: Placement) -> None:
    """Not an error: a multimodal checkpoint, for example, holds parts that a text model does not have."""
    if names:
        where.report(f"{source.name}: {len(names)} of the weights in its files are not used ({names[0]}, ...)")


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises UserError if there is none, or if its files are damaged."""
    if (tokenizer := optional_tokenizer(source)) is None:
        raise UserError(
            f"'{source.name}' has no tokenizer: copy tokenizer.json and tokenizer_config.json next to the weights."
        )
    return tokenizer


def optional_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer, or return None if the checkpoint has none. Raises UserError if its files are damaged."""
    with explained_errors(source.name), quiet():
        if not has_tokenizer(source):
            return None
        tokenizer = read_tokenizer(source)
        tokenizer("Hello")  # some fail only here
        return tokenizer


def remote_code_notes(model: PreTrainedModel, name: str) -> tuple[str, ...]:
    """Return a note for a repository that contains code, in case the user expects it to be run."""
    if getattr(model.config, "auto_map", None):
        return (f"{name} contains Python code of its own: it is not run, the class of transformers is used",)
    return ()


def _progress_line(source: Source, kind: str, where: Placement, needed: int, *, spread: bool) -> str:
    device = "all GPUs and the CPU, because one GPU is too small" if spread else where.device
    size = byte_size(needed) if needed else ""
    words = (device, str(where.dtype).removeprefix("torch."), "" if kind == "none" else kind, size)
    return f"loading {source.name} ({', '.join(filter(None, words))}) ..."


def _left_in_files(
    source: Source, config: PreTrainedConfig, where: Placement
) -> tuple[PreTrainedModel, list[str]] | None:
    """Like `load_from_files`, but None unless transformers' loader is known to load the same weights."""
    stored = load_from_files(source, config, where)
    if stored is None or not isinstance(read_decoder(stored[0]), str) or loads_alike(stored[0], source):
        return stored
    return None


def compared_layers(model: PreTrainedModel) -> int:
    """The number of first layers that hold one of each kind."""
    kinds = layer_kinds(model)
    return 1 + max(map(kinds.index, kinds))


@torch.no_grad()
def loads_alike(model: PreTrainedModel, source: Source) -> bool:
    """Whether the first layers of a model whose weights are in files, with one of each kind, have the logits of those
    that transformers loads, which may convert weights. They must pass the checks of a model that is loaded whole.
    """
    try:
        part = first_layers(model, compared_layers(model))
        size = sum(weight.nbytes for weight in part.parameters())
        if free_bytes("cpu") < size:
            return False
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=part.config,
            dtype=model.dtype,
            use_safetensors=True,
            **source.arguments,
            **({"quantization_config": GgufConfig(dequantize=True)} if source.gguf else {}),
        )
        expected = first_logits(loaded)
        check_runs(loaded, source.name, "none")
        check_causal(loaded, source.name)
        if keeps_all(loaded):  # a note says so when the whole model is loaded
            return False
        del loaded
        release_memory()
        return torch.equal(first_logits(part), expected)
    except Exception:  # the whole model is loaded then, whose errors are explained
        return False


def check_complete(model: PreTrainedModel, loading_info: dict[str, Any], name: str) -> None:
    """Reject missing weights, which transformers would replace by random numbers."""
    missing = sorted(loading_info["missing_keys"])
    head = model.get_output_embeddings()
    # A base model lacks nothing but its head, which would be random.
    if missing and all(dict(model.named_parameters()).get(key) is getattr(head, "weight", None) for key in missing):
        raise UserError(f"'{name}' has no output head ({missing[0]} is missing): use a text generation model.")
    if missing:
        raise UserError(f"'{name}' lacks {len(missing)} of its weights ({missing[0]}, ...): fetch or copy it again.")


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Reject encoders such as BERT, which load as text models but attend to later tokens."""
    if model.config.is_encoder_decoder:
        return
    # (2, 4): only the last token differs, so a causal model computes equal logits before it.
    texts = torch.tensor([[1, 2, 3, 1], [1, 2, 3, 2]], device=model.device) % vocabulary_size(model)
    with torch.no_grad():
        logits, others = model(input_ids=texts, use_cache=False).logits[:, :-1]
    if largest_difference(logits, others) > max_rounding(logits):
        raise UserError(
            f"'{name}' attends to later tokens, so it cannot generate text: use a causal or an encoder-decoder model."
        )


def check_runs(model: PreTrainedModel, name: str, kind: str) -> None:
    """Run a prompt, a decode step, a verify pass and a rewind, because many configuration errors and missing kernels of
    a kind of quantization show only here.

    A cache that cannot be used is not an error here, because the strategies can do without.
    """
    try:
        session = ModelSession(model)
        context = session.begin([1 % vocabulary_size(model)])
        session.feed(context, keep=1)
        room = session.room(context)
        drafts = [0] * (DRAFTS if room is None else min(DRAFTS, room - 1))
        session.feed([*context, *drafts], keep=len(drafts) + 1)
        session.rewind(len(context))
    except UserError:
        return
    except Exception as error:  # anything that a model's own code raises
        if is_out_of_memory(error):
            raise
        how = "was loaded but does not run as a decoder"
        if kind != "none":
            how = f"does not run in {kind} on {model.device}, {model.dtype}"
        remedy = "use a different " + ("model" if kind == "none" else "--quantize")
        raise UserError(f"'{name}' {how} ({first_line(error)}): {remedy}.") from error
