"""EAGLE, EAGLE-2 and HASS drafters, which have one format (arXiv 2401.15077, 2406.16858, 2408.15766), and the layout
that speculators used for them until version 0.3.

A linear layer joins the embedding of a token with the target's last hidden state, and decoder layers follow. The
first one has no input norm, and the target's own head reads the result.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from utils.decode.features import layer_count
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.eagle3 import load_exactly
from utils.drafter_formats.layer_config import decoder_layers, layer_config, sliding_sizes
from utils.drafter_formats.target_parts import load_embedding, load_head, misfit, share_parts
from utils.models.feature_drafter import Conventions, StepwiseDrafter

RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
SHARED = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
FIRST_NORM, EMBEDDING_NORM, OUTPUT_NORM = "layers.0.input_layernorm", "embedding_layernorm", "pre_lm_head_layernorm"


class Eagle1(StepwiseDrafter):
    """An EAGLE drafter, which reads the target's last hidden state after the final norm.

    `config` is that of its layers, with the target's vocabulary size. `norms` are the optional ones that it has.
    `target_layers` is the number of the target's layers. `windows` are described in sliding_sizes.
    """

    embed_tokens: nn.Module
    lm_head: nn.Module

    def __init__(self, config: Any, norms: set[str], target_layers: int, windows: tuple[int | None, ...]) -> None:
        super().__init__()
        self.config, self.target_layers = config, target_layers
        self.doubtful = ("norm_output",) if OUTPUT_NORM in norms else ()
        # Like the target's feature, what is fed back is what the output head reads.
        self.conventions = Conventions((target_layers,), norm_output=OUTPUT_NORM in norms)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = decoder_layers(config, windows, head_norms=False)
        if FIRST_NORM not in norms:
            cast(Any, self.layers[0]).input_layernorm = nn.Identity()
        self.embedding_layernorm = LlamaRMSNorm(hidden, eps) if EMBEDDING_NORM in norms else nn.Identity()
        self.pre_lm_head_layernorm = LlamaRMSNorm(hidden, eps) if OUTPUT_NORM in norms else nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def fuse_features(self, features: Tensor) -> Tensor:
        return features

    def next_states(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        embedded = self.embedding_layernorm(self.embed_tokens(tokens).to(states.dtype))
        states = self.fc(torch.cat([embedded, states], dim=-1))
        tables = self.rotary(states, positions)
        for layer in self.layers:
            states = layer(
                states,
                attention_mask=None,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=tables,
            )
        return states

    def logits(self, state: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.pre_lm_head_layernorm(state))
        return logits

    def feedback(self, state: Tensor) -> Tensor:
        normed: Tensor = self.pre_lm_head_layernorm(state)
        return normed if self.conventions.norm_output else state


def is_eagle1(checkpoint: DrafterCheckpoint) -> bool:
    """Whether `fc` joins two states into one, and the first layer has no input norm, or the layout is the one of
    speculators.
    """
    old = checkpoint.has("fusion_fc.weight", "transformer.self_attn.q_proj.weight")
    shape = _with_common_names(checkpoint).shapes
    fc, query = shape.get("fc.weight", ()), shape.get("layers.0.self_attn.q_proj.weight", ())
    joins = len(fc) == len(query) == 2 and fc[1] == 2 * fc[0] and query[1] == fc[0]
    return joins and (old or (f"{FIRST_NORM}.weight" not in shape and "norm.weight" not in shape))


def load_eagle1(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Eagle1:
    """Build the drafter. Raises UserError if its tensors do not fit its config or the target."""
    checkpoint = _with_common_names(checkpoint)
    size = int(target.config.get_text_config(decoder=True).hidden_size)
    if (stored := checkpoint.shapes["fc.weight"][0]) != size:
        raise misfit(checkpoint, f"its states have {stored} numbers, and those of the target {size}")
    config = layer_config(checkpoint.layer_keys, checkpoint, head_norms=False)
    config.vocab_size = vocabulary_size(target)
    norms = {name for name in (FIRST_NORM, EMBEDDING_NORM, OUTPUT_NORM) if checkpoint.has(f"{name}.weight")}
    with torch.device("meta"):  # random weights would take time and memory
        drafter = Eagle1(config, norms, layer_count(target), sliding_sizes(checkpoint))
    load_exactly(drafter, checkpoint, besides=SHARED)
    embedding = load_embedding(checkpoint, target, config.hidden_size)
    share_parts(drafter, embedding, load_head(checkpoint, target, config.hidden_size), target)
    return drafter


def _with_common_names(checkpoint: DrafterCheckpoint) -> DrafterCheckpoint:
    return checkpoint.renamed(RENAMED)
