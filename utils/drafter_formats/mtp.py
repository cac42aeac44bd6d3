"""Layers for multi-token prediction (MTP) that a target's own checkpoint holds, and which transformers leaves unused
(DeepSeek-V3, arXiv 2412.19437).

A layer joins the embedding of a token with the target's last hidden state before it. Then follow a decoder layer of the
target's own kind and a norm. Drafting applies the first such layer again and again.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer

from utils.decode.features import final_norm, layer_count
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DrafterCheckpoint, JoinedExperts
from utils.drafter_formats.eagle3 import load_exactly
from utils.drafter_formats.target_parts import load_embedding, load_head, misfit, share_parts
from utils.engine import attention
from utils.errors import UserError
from utils.models.feature_drafter import Conventions, StepwiseDrafter

# Keys of configs about single layers, for one layer that has experts.
SPARSE: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
SPARSE |= {"mlp_only_layers": [], "decoder_sparse_step": 1}
SHARED = ("embed_tokens.weight", "lm_head.weight")
BLOCK = "layer.mtp_block."
QUANTIZED = ("weight_scale_inv", "weight_scale", "qweight", "weight_packed", "scales")  # ends of names
ONE = re.compile(r"(.*\.experts)\.(\d+)\.(?:gate|up|down)_proj\.weight")
JOINED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


class Mtp(StepwiseDrafter):
    """An MTP layer of a target.

    `config` is that of the layer, with the target's vocabulary size. Only the classes of `target` are used here.
    """

    is_ambiguous = True  # programs feed the target's state before or after its final norm

    def __init__(self, config: Any, target: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.target_layers, self.rotary_keys = config, layer_count(target), dict[str, str]()
        # What is fed back takes the place of a feature, which is after the final norm too.
        self.conventions, self.doubtful = Conventions((self.target_layers,), norm_output=True), ("norm_output",)
        norm_class, layer_class = type(final_norm(target)), type(cast(Any, target.get_decoder()).layers[-1])
        with torch.device("meta"):  # without memory: the tensors of the checkpoint take the place of these
            # Its norm comes below, because the state before it is needed as well.
            self.layer = MtpLayer(config, layer_class, norm_class, 0, use_post_norm=False)
            self.norm = cast(Any, norm_class)(config.hidden_size, eps=config.rms_norm_eps)

    def next_states(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        embedded = self.embed_tokens(tokens).to(states.dtype)
        arguments = {"position_ids": positions, "past_key_values": cache, "use_cache": True, "attention_mask": None}
        arguments["position_embeddings"] = self.rotary(states, positions, **self.rotary_keys)
        return cast(Tensor, self.layer(embedded, states, **arguments))

    def logits(self, state: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(self.norm(state)))


def load_mtp(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Mtp:
    """Build the drafter from the result of `mtp_layers`. Raises UserError if it does not fit the target."""
    config = target.config.get_text_config(decoder=True)
    check_supported(config.model_type)
    size = int(config.hidden_size)
    if checkpoint.shapes["layer.eh_proj.weight"] != (size, 2 * size):
        raise misfit(checkpoint, f"its projection of tokens and states is {checkpoint.shapes['layer.eh_proj.weight']}")
    drafter = Mtp(_layer_config(target), target)
    load_exactly(drafter, checkpoint, besides=SHARED)
    kept = {name: part for name, part in drafter.layer.named_buffers() if part.is_floating_point()}
    embedding, head = load_embedding(checkpoint, target, size), load_head(checkpoint, target, size)
    rotary = copy.deepcopy(cast(Any, target.get_decoder()).rotary_emb)
    share_parts(drafter, embedding, head, target, rotary=rotary)
    for name, part in kept.items():  # transformers keeps the routers' corrections in float32
        parent, _, leaf = name.rpartition(".")
        drafter.layer.get_submodule(parent).register_buffer(leaf, part.to(target.device, torch.float32))
    # Some families have frequencies of their own for each type of layer.
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        drafter.rotary_keys = {"layer_type": drafter.config.layer_types[0]}
    return drafter


def _layer_config(target: PreTrainedModel) -> Any:
    """The target's config for one layer, which has the index 0, with row-invariant attention."""
    config: Any = copy.deepcopy(target.config.get_text_config(decoder=True))
    config.num_hidden_layers, config.vocab_size = 1, vocabulary_size(target)
    # Keys that name the target's layers by their indices: the MTP layers of sparse targets have experts. Some configs
    # name the types of MTP layers as well.
    for key, value in (("layer_types", ["full_attention"]), *SPARSE.items()):
        if getattr(config, key, None) is not None:
            setattr(config, key, (getattr(config, f"mtp_{key}", None) or [])[:1] or value)
    config._attn_implementation = attention.NAME
    return config


@dataclass(frozen=True, slots=True)
class Layout:
    """How checkpoints of a family name their first MTP layer.

    `prefix` is a pattern for the beginning of its names. `join` is the projection of token and state, without the
    prefix. `names` map beginnings of names to those of this module; other names belong to the decoder layer.
    `model_types` are those of checked targets.
    """

    prefix: str
    join: str
    names: Mapping[str, str]
    model_types: tuple[str, ...]


LAYOUTS = (
    Layout(
        r"layers\.\d+\.",
        "eh_proj.weight",
        {name: f"layer.{name}" for name in ("enorm.", "hnorm.", "eh_proj.")}
        | {"shared_head.norm.": "norm.", "shared_head.head.": "lm_head.", "embed_tokens.": "embed_tokens."},
        ("deepseek_v3", "glm4_moe", "glm4_moe_lite"),
    ),
    Layout(
        r"mtp\.",
        "fc.weight",
        {"pre_fc_norm_embedding.": "layer.enorm.", "pre_fc_norm_hidden.": "layer.hnorm.", "fc.": "layer.eh_proj."}
        | {name: name for name in ("norm.", "lm_head.", "embed_tokens.")}
        | {"layers.0.": BLOCK},
        ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mellum"),
    ),
)


def mtp_layers(checkpoint: DrafterCheckpoint) -> DrafterCheckpoint:
    """The first MTP layer in a target's checkpoint, by the names of `Mtp`.

    Raises UserError if it has none, or none that can be read.
    """
    if (found := found_layout(checkpoint)) is None:
        raise UserError(
            f"'{checkpoint.name}' has no MTP layers in its files that can be read, because many conversions leave them "
            "out: name the original checkpoint as --target, or use a different --drafter."
        )
    layout, prefix = found
    text = checkpoint.config.get("text_config") or checkpoint.config
    check_supported(str(text.get("model_type")))  # before the target is loaded, which may take long
    stored = {name: part for name, part in checkpoint.stored.items() if name.startswith(prefix)}
    if packed := next((name for name in stored if name.endswith(QUANTIZED)), None):
        raise UserError(
            f"The MTP layers of '{checkpoint.name}' are stored in a quantized format ({packed}), which cannot be read: "
            "name a copy in bfloat16 as --target, or use a different --drafter."
        )
    names = {f"{prefix}{old}": new for old, new in layout.names.items()} | {prefix: BLOCK}
    return with_joined_experts(replace(checkpoint, stored=stored).renamed(names))


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
        found = sorted(
            (match[1] for match in map(pattern.fullmatch, checkpoint.stored) if match),
            key=lambda name: (len(name), name),
        )
        if found:
            return layout, found[0]
    return None


def with_joined_experts(checkpoint: DrafterCheckpoint) -> DrafterCheckpoint:
    """The same checkpoint with the experts of each layer as one tensor. Raises UserError if one is missing or has a
    shape of its own.
    """
    counts: dict[str, int] = {}
    for match in filter(None, map(ONE.fullmatch, checkpoint.stored)):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    shapes, stored = checkpoint.shapes, {k: part for k, part in checkpoint.stored.items() if not ONE.fullmatch(k)}
    for prefix, count in counts.items():
        for name, kinds in JOINED.items():
            names = [[f"{prefix}.{index}.{kind}_proj.weight" for kind in kinds] for index in range(count)]
            shape = shapes.get(names[0][0], ())
            if odd := next((part for part in chain(*names) if len(shape) != 2 or shapes.get(part) != shape), None):
                raise UserError(f"'{checkpoint.name}' has no usable tensor {odd}: fetch or copy its files again.")
            experts = [[checkpoint.stored[part] for part in expert] for expert in names]
            stored[f"{prefix}.{name}"] = JoinedExperts(experts, (count, len(kinds) * shape[0], shape[1]))
    return replace(checkpoint, stored=stored)
