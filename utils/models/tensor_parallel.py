"""Whether a target can be split among several processes by the tensor parallel plan of transformers.

Each process then holds a part of every layer and a complete drafter.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from utils.distributed import world_size
from utils.errors import UserError


def check_tensor_parallel(config: PreTrainedConfig, name: str) -> None:
    """Raise UserError for a model without a plan, or whose heads cannot be divided evenly among the processes."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or not getattr(text, "base_model_tp_plan", None):
        raise UserError(f"transformers cannot split '{name}' among processes: start the program without torchrun.")
    heads, groups = (getattr(text, field, None) or 0 for field in ("num_attention_heads", "num_key_value_heads"))
    if heads % world_size() or groups % world_size():
        raise UserError(
            f"'{name}' has {heads} attention heads and {groups} key-value heads, which cannot be divided among "
            f"{world_size()} processes: start the program without torchrun."
        )
