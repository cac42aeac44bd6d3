"""A target that is spread over several processes by transformers' tensor parallel plan: what can be, and what cannot.

Each process holds a part of every layer, and a whole drafter. What reads the target's weights from outside cannot work on parts.
"""

from __future__ import annotations

from typing import Any

from utils.distributed import number_of
from utils.errors import UserError

ALONE = "start it without torchrun"


def check_spreading(config: Any, name: str) -> None:
    """Raise UserError for a model without a plan, or whose heads the processes cannot share evenly."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or not getattr(text, "base_model_tp_plan", None):
        raise UserError(f"'{name}' is of a kind that transformers cannot spread over processes: {ALONE}.")
    heads = [getattr(text, field, None) or 0 for field in ("num_attention_heads", "num_key_value_heads")]
    if any(count % number_of() for count in heads):
        raise UserError(
            f"{number_of()} processes cannot share the {heads[0]} heads ({heads[1]} of keys and values) of '{name}': {ALONE}."
        )
