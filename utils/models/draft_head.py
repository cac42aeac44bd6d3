"""A draft head: one decoder layer that reads a target's hidden states and predicts the next ones (EAGLE).

Entry i combines the target's feature at position i with the embedding of token i + 1; the target's output head turns
the result into a distribution of token i + 2. After the last feature, the head continues from its own states.
EAGLE: Li et al. 2024, arXiv 2401.15077. Features from several depths: EAGLE-3, Li et al. 2025, arXiv 2503.01840.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from utils.decode.model_info import vocabulary_size
from utils.engine import attention
from utils.models.feature_drafter import Conventions, StepwiseDrafter


def feature_layers(count: int) -> tuple[int, ...]:
    """Return the hidden states that a head reads from a target with `count` blocks: early, late and last (-1).

    The last one is the input of the target's output head.
    """
    return tuple(dict.fromkeys((max(1, count // 4), max(1, 3 * count // 4), -1)))


@dataclass(frozen=True, slots=True)
class DraftHeadShape:
    """Sizes of a head, stored in its head.json.

    `hidden` is the target's hidden size. `layers` are the hidden states that it reads, see feature_layers. `heads` and
    `groups` are its attention and key-value heads, `width` is the size of its MLP, `theta` its rotary base, and
    `positions` its context length.
    """

    hidden: int
    layers: tuple[int, ...]
    heads: int
    groups: int
    width: int
    theta: float
    positions: int


class Head(nn.Module):
    """The weights of a head. TargetHead adds what it shares with its target."""

    def __init__(self, shape: DraftHeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.width,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            head_dim=shape.hidden // shape.heads,
            # The head's own rotary base, without the target's long-context scaling.
            rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
            max_position_embeddings=shape.positions,
            # For training, which passes a mask. TargetHead selects row-invariant attention for drafting.
            attn_implementation="sdpa",
        )
        # These names are keys of the weights file.
        size = shape.hidden
        self.read = nn.Linear(size * len(shape.layers), size, bias=False)
        self.norm_feature, self.norm_token = LlamaRMSNorm(size), LlamaRMSNorm(size)
        self.mix = nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaDecoderLayer(self.config, 0)
        self.norm = LlamaRMSNorm(size)
        self.rotary = LlamaRotaryEmbedding(self.config)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The hidden states that it reads."""
        return self.shape.layers

    def fuse_features(self, features: Tensor) -> Tensor:
        """Map features of the target (B, T, F) to states (B, T, H) like the head's own."""
        states: Tensor = self.read(features)
        return states

    def feedback(self, state: Tensor) -> Tensor:
        """The state itself: it is fed back before the final norm."""
        return state

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, *, cache: Any = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the next states (B, T, H) at `positions` (1, T).

        `states` (B, T, H) are those before, and `embedded` (B, T, H) the embeddings of the tokens that follow them.
        """
        mixed = self.mix(torch.cat([self.norm_token(embedded), self.norm_feature(states)], dim=-1))
        next_states: Tensor = self.layer(
            mixed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=self.rotary(mixed, positions),
        )
        return next_states


def shape_for(target: PreTrainedModel, layers: tuple[int, ...]) -> DraftHeadShape:
    """Return the shape of a head whose layer is as wide as a block of the target."""
    config = target.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    # The head size is hidden / heads here, whatever the target's own head size is.
    divisible = hidden % (2 * heads) == 0  # rotary embeddings need an even size per head
    rope = getattr(config, "rope_parameters", None) or {}
    return DraftHeadShape(
        hidden=hidden,
        layers=layers,
        heads=heads if divisible else 1,
        groups=(getattr(config, "num_key_value_heads", None) or heads) if divisible else 1,
        width=getattr(config, "intermediate_size", None) or 4 * hidden,
        theta=float(rope.get("rope_theta", 10_000.0)) if isinstance(rope, dict) else 10_000.0,
        positions=getattr(config, "max_position_embeddings", None) or 1 << 17,
    )


class TargetHead(StepwiseDrafter):
    """A head together with its target's embedding and the rows of the target's output head (V', H) that it drafts from.

    `vocabulary` (V',) has the ascending token ids of these rows; other tokens are never drafted. Like a drafter model
    it has a config, a name and a device.
    """

    def __init__(self, head: Head, target: PreTrainedModel, vocabulary: Tensor) -> None:
        super().__init__()
        self.head = head.to(target.device, target.dtype).eval().requires_grad_(False)
        self.conventions = Conventions(head.shape.layers)
        self.head.rotary = LlamaRotaryEmbedding(head.config).to(target.device)  # its frequencies stay float32
        self.config = head.config
        # Sessions read the vocabulary off the config, and a head answers with logits over all of it.
        self.config.vocab_size = vocabulary_size(target)
        self.config._attn_implementation = attention.NAME
        self.embed = target.get_input_embeddings()
        self.vocabulary: Tensor
        self.register_buffer("vocabulary", vocabulary.to(target.device))
        rows = target.get_output_embeddings().weight.detach()[self.vocabulary]
        # A linear layer instead of a matrix, so that the engine can replace it by a kernel.
        self.rows = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
        self.rows.weight = nn.Parameter(rows, requires_grad=False)
        self.device, self.dtype = target.device, target.dtype
        self.name_or_path = "head"

    def fuse_features(self, features: Tensor) -> Tensor:
        return self.head.fuse_features(features)

    def next_states(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        next_states: Tensor = self.head(states, self.embed(tokens), positions, cache=cache)
        return next_states

    def logits(self, state: Tensor) -> Tensor:
        drafted: Tensor = self.rows(self.head.norm(state))  # (T, V')
        # Softmax gives minus infinity a probability of exactly 0, so q needs no second vocabulary.
        logits = drafted.new_full((len(drafted), self.config.vocab_size), float("-inf"))
        return logits.index_copy_(1, self.vocabulary, drafted)
