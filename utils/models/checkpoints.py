"""One checkpoint into memory: its model in evaluation mode, and its tokenizer.

The policy is fixed here: safetensors or GGUF only, no remote code, no gradients, nothing missing. Which two checkpoints make a pair is
loading.py's question.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
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

from utils.caching import vocabulary_size
from utils.errors import UserError
from utils.models.devices import Placement
from utils.models.failures import explained, quiet
from utils.models.hub import sound
from utils.models.quantization import loading_arguments, quantize_loaded
from utils.models.room import Room, find_room
from utils.models.sources import Source, has_tokenizer
from utils.models.spreading import check_spreading
from utils.rounding import Spread, most_rounding
from utils.units import in_units


def load_model(source: Source, kind: str, where: Placement) -> PreTrainedModel:
    """The model, quantized as `kind` says. Raises UserError when it cannot be had, for whatever reason."""
    room = find_room(source, kind, where)
    where.report(_told(source, kind, where, room))
    with _reading(source):
        config = AutoConfig.from_pretrained(source.place, **source.arguments)
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
        _check_complete(outcome, source.name)
        _check_numbers(model, source.name)
        quantize_loaded(model, kind, source.name)
        _check_causal(model, source.name)
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


def _check_numbers(model: PreTrainedModel, name: str) -> None:
    """A weight that is no number makes every law one that is none, at the first token that meets it."""
    for part, weight in model.named_parameters():
        own = weight.to_local() if isinstance(weight, DTensor) else weight  # of a spread one this process's part
        if own.is_floating_point() and own.numel() and not own.is_meta and not torch.isfinite(torch.stack(own.detach().aminmax())).all():
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
    with _reading(source):
        return AutoTokenizer.from_pretrained(source.place, **source.arguments) if has_tokenizer(source) else None


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


def _check_complete(outcome: dict[str, Any], name: str) -> None:
    """transformers fills what a checkpoint lacks with random numbers and goes on."""
    if missing := sorted(outcome["missing_keys"]):
        raise UserError(f"'{name}' lacks {len(missing)} of its weights ({missing[0]}, ...): fetch or copy it again.")
