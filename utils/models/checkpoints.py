"""One checkpoint into memory: its model in evaluation mode, and its tokenizer.

The policy is fixed here: safetensors or GGUF only, no remote code, no gradients, nothing missing. Which two checkpoints make a pair is
loading.py's question.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DistributedConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from utils.models.devices import Placement
from utils.models.hub import sound
from utils.models.load_checks import check_causal, check_complete, check_numbers, check_runs
from utils.models.load_errors import explained, quiet
from utils.models.memory import Room, find_room
from utils.models.quantization import check_stored, loading_arguments, quantize_loaded
from utils.models.sources import Source, has_tokenizer
from utils.models.tensor_parallel import check_spreading
from utils.units import in_units


def load_model(source: Source, kind: str, where: Placement) -> PreTrainedModel:
    """The model, quantized as `kind` says. Raises UserError when it cannot be had, for whatever reason."""
    room = find_room(source, kind, where)
    where.report(_told(source, kind, where, room))
    with _reading(source):
        config = AutoConfig.from_pretrained(source.place, **source.arguments)
        check_stored(config, kind, source.name)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model, outcome = auto.from_pretrained(
            source.place,
            config=config,  # read already, which takes seconds for a GGUF file
            dtype=where.dtype,
            use_safetensors=True,
            output_loading_info=True,
            **source.arguments,
            **_format_arguments(source, kind, where.dtype),
            **_place_arguments(config, source.name, where, room),
        )
        check_complete(model, outcome, source.name)
        check_numbers(model, source.name)
        quantize_loaded(model, kind, source.name)
        check_runs(model, source.name)
        check_causal(model, source.name)
    if unused := sorted(outcome["unexpected_keys"]):
        where.report(f"{source.name}: {len(unused)} of the weights in its files are not used ({unused[0]}, ...)")
    model.name_or_path = source.name  # what sentences call it; the config keeps the place
    return model.eval().requires_grad_(False)


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    """Whatever goes wrong inside is a UserError; nothing else is heard of it."""
    with explained(source.name), quiet(), sound(source.place) if source.hub is not None else nullcontext():
        yield


def _told(source: Source, kind: str, where: Placement, room: Room) -> str:
    device = "all GPUs and the CPU, since one GPU has not enough memory" if room.spread else where.device
    size = in_units(room.needed) if room.needed else ""
    words = [device, str(where.dtype).removeprefix("torch."), "" if kind == "none" else kind, size]
    return f"loading {source.name} ({', '.join(filter(None, words))}) ..."


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the checkpoint brings none. Raises UserError when its files are damaged."""
    with _reading(source):
        if not has_tokenizer(source):
            return None
        tokenizer = AutoTokenizer.from_pretrained(source.place, **source.arguments)
        tokenizer("Hello")  # some fail only here
        return tokenizer


def code_notes(model: PreTrainedModel, name: str) -> tuple[str, ...]:
    """A sentence for a repository that ships code: somebody may expect it to be run."""
    if getattr(model.config, "auto_map", None):
        return (f"{name} ships Python code of its own: it is not run, the class of transformers is used",)
    return ()


def _format_arguments(source: Source, kind: str, dtype: torch.dtype | str) -> dict[str, Any]:
    # Without `dequantize` a GGUF model keeps its packed blocks, which no other step here can use.
    return {"quantization_config": GgufConfig(dequantize=True)} if source.gguf else loading_arguments(kind, dtype)


def _place_arguments(config: Any, name: str, where: Placement, room: Room) -> dict[str, Any]:
    if room.spread:
        return {"device_map": "auto"}  # accelerate moves the text from layer to layer
    if not where.parted:
        return {"device_map": {"": where.device}}  # straight to the device: no second copy in main memory
    check_spreading(config, name)
    return {"distributed_config": DistributedConfig(tp_plan="auto")}
