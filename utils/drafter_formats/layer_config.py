"""The config of a drafter's layers, from the keys of its config.json. They are checked here, because the errors of the
libraries that would read them do not name the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.engine import attention
from utils.errors import UserError

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
POSITIVE = ("rms_norm_eps", "rope_theta")
ACTIVATION, ROPES = "hidden_act", ("rope_scaling", "rope_parameters")
# Others, such as the drafter's vocabulary, do not concern the layers.
LAYER_KEYS = (*SIZES, *POSITIVE, ACTIVATION, *ROPES)
ROPE_TYPES = {"default", "mrope", *ROPE_INIT_FUNCTIONS}
TYPE_NAMES = ("rope_type", "type")
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
    for name in chosen:
        if name in ROPES:
            chosen[name] = _one_rope(checkpoint, name, chosen[name])
        elif wanted := _unmet(name, chosen[name]):
            raise checkpoint.unusable(name, chosen[name], wanted)
        elif name == "rms_norm_eps":
            chosen[name] = float(chosen[name])  # transformers refuses whole numbers
    try:
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


def _unmet(name: str, value: Any) -> str:
    """What the value of a key should be; empty if it is that."""
    if name in SIZES:
        return "" if type(value) is int and value >= 1 else "a whole number from 1"
    if name in POSITIVE:
        return "" if type(value) in (int, float) and 0 < value < float("inf") else "a number above 0"
    # ACT2FN creates the value of a name on access.
    return "" if isinstance(value, str) and value in ACT2FN else "the name of an activation function of transformers"


def _one_rope(checkpoint: DrafterCheckpoint, key: str, rope: Any) -> dict[str, Any]:
    """The rotary parameters of a text drafter, from those of a target with several kinds of layers or of inputs."""
    if isinstance(rope, dict):
        rope = rope.get("sliding_attention") or rope.get("full_attention") or rope  # this order is speculators'
    if not isinstance(rope, dict):
        raise checkpoint.unusable(key, rope, "an object")
    kept = {name: value for name, value in rope.items() if not name.startswith("mrope_") and value is not None}
    for name, value in kept.items():
        if name in TYPE_NAMES:
            if value not in ROPE_TYPES:
                raise checkpoint.unusable(f"{name} of {key}", value, f"one of {', '.join(sorted(ROPE_TYPES))}")
            if value == "mrope":  # of a text, the positions in height and width are those in time
                kept[name] = "default"
        elif isinstance(value, str | dict) or (name == "rope_theta" and (wanted := _unmet(name, value))):
            raise checkpoint.unusable(f"{name} of {key}", value, wanted if name == "rope_theta" else "a number")
    return kept


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
