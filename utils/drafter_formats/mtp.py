"""Layers for multi-token prediction (MTP) that a target's own checkpoint holds, and which transformers leaves unused
(DeepSeek-V3, arXiv 2412.19437).

A layer joins the embedding of a token with the target's last hidden state before it. Then follow a decoder layer of the
target's own kind and a norm. Drafting applies the first such layer again and again.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer

from utils.decode.features import final_norm, layer_count
from utils.decode.kv_cache import new_cache
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.eagle3 import load_exactly
from utils.drafter_formats.mtp_layouts import SHARED, check_supported, found_layout, mtp_layers
from utils.drafter_formats.target_parts import DraftHead, load_embedding, load_head, misfit
from utils.engine import attention
from utils.models.feature_drafter import Conventions, StepwiseDrafter

# Keys of configs about single layers, for one layer that has experts.
SPARSE: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
SPARSE |= {"mlp_only_layers": [], "decoder_sparse_step": 1}


class Mtp(StepwiseDrafter):
    """An MTP layer of a target. config: of that layer, with the target's vocabulary size. target: only its classes are
    used here.
    """

    embed_tokens: nn.Module
    lm_head: nn.Module
    rotary: nn.Module

    def __init__(self, config: Any, target: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.target_layers = config, layer_count(target)
        # What is fed back takes the place of a feature, which is after the final norm too.
        self.conventions, self.doubtful = Conventions((self.target_layers,), norm_output=True), ("norm_output",)
        norm_class, layer_class = type(final_norm(target)), type(cast(Any, target.get_decoder()).layers[-1])
        with torch.device("meta"):  # without memory: the tensors of the checkpoint take the place of these
            # Its norm comes below, because the state before it is needed as well.
            self.layer = MtpLayer(config, layer_class, norm_class, 0, use_post_norm=False)
            self.norm = cast(Any, norm_class)(config.hidden_size, eps=config.rms_norm_eps)

    def share(self, embedding: nn.Module, head: DraftHead, target: PreTrainedModel) -> Mtp:
        """Take the embedding and the output head, and move to the target's device and number format."""
        self.embed_tokens, self.lm_head = embedding, head
        kept = {name: part for name, part in self.layer.named_buffers() if part.is_floating_point()}
        self.to(target.device, target.dtype).eval().requires_grad_(False)
        for name, part in kept.items():  # transformers keeps the routers' corrections in float32
            self.layer.get_submodule(name.rpartition(".")[0]).register_buffer(
                name.rpartition(".")[2], part.to(target.device, torch.float32)
            )
        self.rotary = copy.deepcopy(cast(Any, target.get_decoder()).rotary_emb)  # its frequencies stay float32
        # Some families have frequencies of their own for each type of layer.
        named = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self.rotary_keys = {"layer_type": self.config.layer_types[0]} if named else {}
        self.device, self.dtype = target.device, target.dtype
        return self

    def new_cache(self) -> Any:
        # A sliding cache could not bring back what rejected drafts pushed out of its window.
        return new_cache(self.config, keeps_all=True)

    def fuse_features(self, features: Tensor) -> Tensor:
        return features

    def next_states(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        result: Tensor = self.layer(
            self.embed_tokens(tokens).to(states.dtype),
            states,
            position_embeddings=self.rotary(states, positions, **self.rotary_keys),
            attention_mask=None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return result

    def logits(self, state: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(state))
        return logits

    def feedback(self, state: Tensor) -> Tensor:
        normed: Tensor = self.norm(state)
        return normed if self.conventions.norm_output else state


def load_mtp(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Mtp:
    """Build the drafter from the result of `mtp_layers`. Raises UserError if it does not fit the target."""
    config = target.config.get_text_config(decoder=True)
    check_supported(config.model_type)
    size = int(config.hidden_size)
    if checkpoint.shapes["layer.eh_proj.weight"] != (size, 2 * size):
        raise misfit(checkpoint, f"its projection of tokens and states is {checkpoint.shapes['layer.eh_proj.weight']}")
    drafter = Mtp(_layer_config(target), target)
    load_exactly(drafter, checkpoint, besides=SHARED)
    return drafter.share(load_embedding(checkpoint, target, size), load_head(checkpoint, target, size), target)


def is_mtp(checkpoint: DrafterCheckpoint) -> bool:
    """Whether a drafter's own files hold an MTP layer."""
    found = found_layout(checkpoint)
    return found is not None and found[0].alone and checkpoint.config.get("speculators_model_type") == "mtp"


def load_published_mtp(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Mtp:
    """Build the drafter of files of its own. Raises UserError if they do not fit the target."""
    made_for = (checkpoint.config.get("transformer_layer_config") or {}).get("model_type")
    own = target.config.get_text_config(decoder=True).model_type
    if made_for != own:
        raise misfit(checkpoint, f"its layer is of the model type {made_for}, and the target of the type {own}")
    return load_mtp(mtp_layers(checkpoint), target)


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
