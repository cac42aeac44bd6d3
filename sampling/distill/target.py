"""The target of a distillation: its number format, loading it, and checking that a drafter can be trained for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sampling.distill.options import AUTO
from sampling.distill.progress import Report
from utils.errors import UserError
from utils.models.checkpoints import load_model, load_tokenizer
from utils.models.devices import Placement, choose_device
from utils.models.gguf_model import convert_if_gguf
from utils.models.sources import locate


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target. lm_head: the weight (V, H) of its output layer."""

    model: Any
    tokenizer: Any
    lm_head: Tensor


def load_target(name: str, device_name: str, report: Report, *, dtype: str = AUTO) -> Target:
    """Load a hub id, folder, GGUF file or `embedded`. Raises UserError if no drafter can be trained for it."""
    device = choose_device(device_name)
    placement = Placement(device, training_dtype(device) if dtype == AUTO else getattr(torch, dtype), report)
    source = convert_if_gguf(locate(name, report), placement)
    model = load_model(source, "none", placement)
    return Target(model, load_tokenizer(source), output_weight(model))


def training_dtype(device: str) -> torch.dtype:
    """bfloat16 where the hardware has instructions for it, float32 elsewhere."""
    if device.startswith("cuda"):
        is_short = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_short = device == "cpu" and torch.cpu._is_amx_tile_supported()  # without matrix tiles bfloat16 is slow
    return torch.bfloat16 if is_short else torch.float32


@torch.no_grad()
def output_weight(model: Any) -> Tensor:
    """The weight (V, H) that maps the last hidden state to the logits. Raises UserError if there is none."""
    name, layer = model.name_or_path, model.get_output_embeddings()
    if model.config.is_encoder_decoder:
        raise UserError(f"{name} is an encoder-decoder model: drafters can be trained for decoder-only models only.")
    if getattr(model, "_is_stateful", False):
        raise UserError(f"{name} is a recurrent model: drafters can be trained for models with attention only.")
    weight: Tensor | None = getattr(layer, "weight", None)
    # Training computes the target's logits from stored features by this matrix alone.
    if weight is None or getattr(layer, "bias", None) is not None or weight.dim() != 2:
        raise UserError(f"The output layer of {name} is not a bias-free matrix: no drafter can be trained for it.")
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
    output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    product = torch.nn.functional.linear(output.hidden_states[-1], weight).float()
    # The bound leaves room for the rounding of bfloat16.
    if (product - output.logits.float()).norm() > 0.05 * output.logits.float().norm():
        raise UserError(f"{name} caps or scales its logits after the output layer: no drafter can be trained for it.")
    return weight.detach()
