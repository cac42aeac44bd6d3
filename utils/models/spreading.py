"""A target that is spread over several processes by transformers' tensor parallel plan: what can be, and what cannot.

Each process holds a part of every layer, and a whole drafter. What reads the target's weights from outside cannot work on parts.
"""

from __future__ import annotations

from typing import Any

import torch

from utils.errors import UserError
from utils.models.requests import HEAD, PairRequest
from utils.processes import number_of

ALONE = "start it without torchrun"


def check_pair(request: PairRequest) -> None:
    """Raise UserError for words that do not go with a spread target. Devices and quantizations are settled."""
    if request.quantize != "none":
        raise UserError(f"{request.quantize} weights cannot be spread over processes: leave --quantize out under torchrun.")
    kind = torch._C._get_accelerator().type  # where transformers will put it
    if not request.device.startswith(kind):
        raise UserError(f"torchrun spreads the target over {kind} devices here, not over {request.device}: leave --device out.")
    if request.drafter == HEAD:
        raise UserError("A head reads weights of the target that torchrun spreads over processes: give another --drafter.")


def check_spreading(config: Any, name: str) -> None:
    """Raise UserError for a model without a plan, or whose heads the processes cannot share evenly."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or not getattr(text, "base_model_tp_plan", None):
        raise UserError(f"'{name}' is of a kind that transformers cannot spread over processes: {ALONE}.")
    heads = [getattr(text, field, None) or 0 for field in ("num_attention_heads", "num_key_value_heads")]
    if any(count % number_of() for count in heads):
        raise UserError(f"{number_of()} processes cannot share the {heads[0]} heads ({heads[1]} of keys and values) of '{name}': {ALONE}.")
