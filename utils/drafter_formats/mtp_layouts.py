"""How checkpoints name the tensors of MTP layers, and which layers are supported."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.experts import with_joined_experts
from utils.errors import UserError

SHARED = ("embed_tokens.weight", "lm_head.weight")
BLOCK = "layer.mtp_block."
DEPTH_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # in config.json
QUANTIZED = ("weight_scale_inv", "weight_scale", "qweight", "weight_packed", "scales")  # ends of names


@dataclass(frozen=True, slots=True)
class Layout:
    """How checkpoints of a family name their first MTP layer.

    prefix: a pattern of what its names begin with. join: the projection of token and state, without the prefix. names:
    beginnings of names, and what this module calls them; other names belong to the decoder layer. model_types: of the
    targets with which the layout was checked. alone: the layer has files of its own, so the embedding and the output
    head in them belong to it too.
    """

    prefix: str
    join: str
    names: Mapping[str, str]
    model_types: tuple[str, ...]
    alone: bool = False


LAYOUTS = (
    Layout(
        r"layers\.\d+\.",
        "eh_proj.weight",
        {
            "enorm.": "layer.enorm.",
            "hnorm.": "layer.hnorm.",
            "eh_proj.": "layer.eh_proj.",
            "shared_head.norm.": "norm.",
            "shared_head.head.": "lm_head.",
            "embed_tokens.": "embed_tokens.",
        },
        ("deepseek_v3", "glm4_moe", "glm4_moe_lite"),
    ),
    Layout(
        r"mtp\.",
        "fc.weight",
        {
            "pre_fc_norm_embedding.": "layer.enorm.",
            "pre_fc_norm_hidden.": "layer.hnorm.",
            "fc.": "layer.eh_proj.",
            "norm.": "norm.",
            "lm_head.": "lm_head.",
            "embed_tokens.": "embed_tokens.",
            "layers.0.": BLOCK,
        },
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mellum"),
    ),
    Layout(  # of the package speculators, for layers that were trained further (FastMTP, arXiv 2509.18362)
        r"mtp_layers\.0\.",
        "input_proj.weight",
        {
            "token_layernorm.": "layer.enorm.",
            "hidden_layernorm.": "layer.hnorm.",
            "input_proj.": "layer.eh_proj.",
            "final_layernorm.": "norm.",
        },
        ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        alone=True,
    ),
)


def mtp_layers(checkpoint: DrafterCheckpoint) -> DrafterCheckpoint:
    """The first MTP layer in a target's checkpoint, by the names of `Mtp`.

    Raises UserError if it has none, or none that can be read.
    """
    found = found_layout(checkpoint)
    # Before the target is loaded, which may take long.
    if (found or _odd_name(checkpoint.shapes)) and (model_type := _target_type(checkpoint)):
        check_supported(model_type)
    if found is None:
        raise no_layers(checkpoint.name, checkpoint.config, checkpoint.shapes)
    layout, prefix = found
    own = (prefix, *SHARED) if layout.alone else prefix
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name.startswith(own)}
    if stored := next((name for name in shapes if name.endswith(QUANTIZED)), None):
        raise UserError(
            f"The MTP layers of '{checkpoint.name}' are stored in a quantized format ({stored}), which cannot be read: "
            "name a copy in bfloat16 as --target, or use a different --drafter."
        )
    names = {f"{prefix}{old}": new for old, new in layout.names.items()} | {prefix: BLOCK}
    part = replace(checkpoint, shapes=shapes, files={name: checkpoint.files[name] for name in shapes})
    return with_joined_experts(part.renamed(names))


def no_layers(name: str, config: Mapping[str, Any], tensors: Collection[str] = ()) -> UserError:
    """An error for a target without MTP layers that can be read. config: its config.json. tensors: names of tensors."""
    text = config.get("text_config") or config
    remedy = "use a different --drafter"
    if odd := _odd_name(tensors):
        return UserError(f"'{name}' names the tensors of its MTP layers in an unknown way ({odd}): {remedy}.")
    if isinstance(text, dict) and any(text.get(key) for key in DEPTH_KEYS):
        return UserError(
            f"'{name}' was made from a model with MTP layers, but its files do not hold them, because many conversions "
            f"leave them out: name the original checkpoint as --target, or {remedy}."
        )
    return UserError(f"'{name}' has no MTP layers in its files, which --drafter mtp needs: {remedy}.")


def _odd_name(tensors: Collection[str]) -> str | None:
    """The first tensor that belongs to an MTP layer by its name."""
    return next((tensor for tensor in sorted(tensors) if tensor.startswith("mtp")), None)


def _target_type(checkpoint: DrafterCheckpoint) -> str | None:
    """The model type of the text model in a target's files. None if they do not say, or are a drafter's own."""
    text = checkpoint.config.get("text_config") or checkpoint.config
    model_type = text.get("model_type") if isinstance(text, dict) else None
    own = checkpoint.config.get("speculators_model_type")
    return model_type if isinstance(model_type, str) and not own else None


def check_supported(model_type: str) -> None:
    """Raise UserError for targets whose MTP layers are not supported."""
    known = dict.fromkeys(name for layout in LAYOUTS for name in layout.model_types)
    if model_type not in known:
        raise UserError(
            f"MTP layers of the model type {model_type:.40} are not supported: use a different --drafter, or a target "
            f"of one of the types {', '.join(known)}."
        )


def found_layout(checkpoint: DrafterCheckpoint) -> tuple[Layout, str] | None:
    """The layout of the first MTP layer, and what its names begin with."""
    for layout in LAYOUTS:
        pattern = re.compile(f"({layout.prefix}){re.escape(layout.join)}")
        # By length first, so that layer 9 comes before layer 10.
        found = sorted((match[1] for match in map(pattern.fullmatch, checkpoint.shapes) if match), key=_in_order)
        if found:
            return layout, found[0]
    return None


def _in_order(prefix: str) -> tuple[int, str]:
    return len(prefix), prefix
