"""The config of a drafter's layers, from the keys of its config.json, and the layers."""

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.engine import attention
from utils.errors import UserError

ROPES = ("rope_scaling", "rope_parameters")
# Others, such as the drafter's vocabulary, do not concern the layers.
LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "hidden_act",
    *ROPES,
)
FULL, SLIDING = "full_attention", "sliding_attention"


class LlamaLayers(LlamaConfig):
    """Llama's keys, with heads whose size times their number need not be the hidden size."""

    def validate_architecture(self) -> None:
        """Sizes are compared with the tensors instead."""


def layer_config(given: dict[str, Any], checkpoint: DrafterCheckpoint, *, head_norms: bool) -> Any:
    """The config of the drafter's layers, with row-invariant attention. `given` has the keys of config.json about them.

    Raises UserError for a value that cannot be used.
    """
    chosen = {name: given[name] for name in LAYER_KEYS if given.get(name) is not None}
    try:
        chosen |= {name: _one_rope(chosen[name]) for name in ROPES if name in chosen}
        if "rms_norm_eps" in chosen:
            chosen["rms_norm_eps"] = float(chosen["rms_norm_eps"])  # transformers refuses whole numbers
        config = (Qwen3Config if head_norms else LlamaLayers)(
            **chosen, num_hidden_layers=checkpoint.layer_count(), attn_implementation=attention.NAME
        )
        config.validate_rope()  # transformers runs its checks for its own classes only
    except Exception as error:  # whatever its validation raises for values that do not fit together
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"'{checkpoint.name}' has a config.json that does not describe its layers ({reason})."
        ) from error
    return config


def _one_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a text drafter, from those of a target with several kinds of layers or of inputs."""
    rope = rope.get(SLIDING) or rope.get(FULL) or rope  # this order is speculators'
    # Of a text, the positions in height and width are those in time, so "mrope" is "default".
    kept = {name: value for name, value in rope.items() if not name.startswith("mrope_") and value is not None}
    return {name: "default" if value == "mrope" else value for name, value in kept.items()}


def sliding_sizes(checkpoint: DrafterCheckpoint) -> tuple[int | None, ...]:
    """The number of positions that each layer attends to, its own included. None for all.

    Raises UserError for layers of a different kind, or without a size.
    """
    keys, count = checkpoint.layer_keys, checkpoint.layer_count()
    types = (keys.get("layer_types") or [FULL] * count)[:count]  # some are copies of the target's, which has more
    if len(types) < count or set(types) - {FULL, SLIDING}:
        raise UserError(
            f"'{checkpoint.name}' has layer_types in its config.json that are not {FULL} or {SLIDING} for each of its "
            f"{count} layers."
        )
    # A config may keep the size of a window that it turns off.
    if SLIDING not in types or keys.get("use_sliding_window") is False:
        return (None,) * count
    size = keys.get("sliding_window")
    if not isinstance(size, int) or size < 1:
        raise UserError(f"'{checkpoint.name}' has sliding layers but no sliding_window in its config.json.")
    return tuple(size if kind == SLIDING else None for kind in types)


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
