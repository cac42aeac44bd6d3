"""Which layers of a drafter attend to a sliding window only, by its config, and layers that do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"


def sliding_sizes(checkpoint: DrafterCheckpoint) -> tuple[int | None, ...]:
    """The number of positions that each layer attends to, its own included. None for all.

    Raises UserError for layers of a different kind, or without a size.
    """
    keys, count = checkpoint.layer_keys, checkpoint.layer_count()
    types = keys.get("layer_types") or [FULL] * count
    # Some configs are copies of the target's, which has more layers.
    if not isinstance(types, list) or len(types) < count or any(kind not in (FULL, SLIDING) for kind in types[:count]):
        raise UserError(
            f"'{checkpoint.name}' has layer_types in its config.json that are not {FULL} or {SLIDING} for each of its "
            f"{count} layers."
        )
    # A config may keep the size of a window that it turns off.
    if SLIDING not in types[:count] or keys.get("use_sliding_window") is False:
        return (None,) * count
    size = keys.get("sliding_window")
    if not isinstance(size, int) or size < 1:
        raise UserError(f"'{checkpoint.name}' has sliding layers but no sliding_window in its config.json.")
    return tuple(size if kind == SLIDING else None for kind in types[:count])


def decoder_layers(config: Any, windows: Sequence[int | None], *, head_norms: bool) -> nn.ModuleList:
    """Layers of Llama or, with head norms, of Qwen3. windows: see sliding_sizes; empty: all attend to all positions."""
    # Qwen3's layers without their head norms are Llama's, except that these know no sliding window.
    layers = nn.ModuleList(Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers))
    for index, layer in enumerate(layers):
        attends = cast(Any, layer).self_attn
        attends.sliding_window = windows[index] if windows else None
        if not head_norms:
            attends.q_norm, attends.k_norm = nn.Identity(), nn.Identity()
    return layers
