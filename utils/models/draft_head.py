"""A head: one decoder layer that reads a target's hidden states and guesses the ones to come, so that the target's own head can draft.

EAGLE (Li et al. 2024, arXiv 2401.15077): at entry i it is given the target's feature of position i and the embedding of token i + 1, and
its state there, read by the target's own head, is a law of token i + 2. Behind the last feature it goes on with its own states. As in
the third version (arXiv 2503.01840) features come from several depths and training unrolls that. Of the target's head only the rows of
the most frequent tokens are used: all others have no probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from utils.decode.model_session import vocabulary_size
from utils.engine import attention


def feature_layers(count: int) -> tuple[int, ...]:
    """Early, late and last of `count` blocks (Li et al. 2025, arXiv 2503.01840); the last is what the target's own head reads."""
    return tuple(dict.fromkeys((max(1, count // 4), max(1, 3 * count // 4), -1)))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """hidden: the target's width. layers: the hidden states it reads, see feature_layers. width: of its own MLP."""

    hidden: int
    layers: tuple[int, ...]
    heads: int
    groups: int
    width: int
    theta: float
    positions: int


class Head(nn.Module):
    """The head's own weights. What it shares with its target is in Grafted."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.width,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            head_dim=shape.hidden // shape.heads,
            rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
            max_position_embeddings=shape.positions,
            attn_implementation="sdpa",
        )
        size = shape.hidden
        self.read = nn.Linear(size * len(shape.layers), size, bias=False)
        self.norm_feature, self.norm_token = LlamaRMSNorm(size), LlamaRMSNorm(size)
        self.mix = nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaDecoderLayer(self.config, 0)
        self.norm = LlamaRMSNorm(size)
        self.rotary = LlamaRotaryEmbedding(self.config)

    def guess(self, features: Tensor) -> Tensor:
        """What is read in a target's features (B, T, F): states (B, T, H) such as the head's own are."""
        state: Tensor = self.read(features)
        return state

    def forward(
        self, states: Tensor, embedded: Tensor, places: Tensor, *, cache: Any = None, mask: Tensor | None = None
    ) -> Tensor:
        """The next states (B, T, H), from states and the embedded tokens that follow them, at `places` (1, T)."""
        mixed = self.mix(torch.cat([self.norm_token(embedded), self.norm_feature(states)], dim=-1))
        turned = self.rotary(mixed, places)
        out: Tensor = self.layer(
            mixed,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=turned,
        )
        return out


def shape_for(target: Any, layers: tuple[int, ...]) -> HeadShape:
    """A head as wide as the target's blocks."""
    config = target.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return HeadShape(
        hidden=hidden,
        layers=layers,
        heads=heads if not hidden % (2 * heads) else 1,
        groups=(getattr(config, "num_key_value_heads", None) or heads) if not hidden % (2 * heads) else 1,
        width=getattr(config, "intermediate_size", None) or 4 * hidden,
        theta=float(rope.get("rope_theta", 10_000.0)) if isinstance(rope, dict) else 10_000.0,
        positions=getattr(config, "max_position_embeddings", None) or 1 << 17,
    )


class Grafted(nn.Module):
    """A head on its target: with the target's embedding, and those rows of the target's head (V', H) that it drafts from.

    vocabulary: their ids (V',), ascending. It stands where a drafter model would: it has a config, a name, a device.
    """

    def __init__(self, head: Head, target: Any, vocabulary: Tensor) -> None:
        super().__init__()
        self.head = head.to(target.device, target.dtype).eval().requires_grad_(False)
        self.head.rotary = LlamaRotaryEmbedding(head.config).to(target.device)  # its frequencies stay float32
        self.config = head.config
        self.config.vocab_size = vocabulary_size(target)
        self.config._attn_implementation = attention.NAME
        self.embed = target.get_input_embeddings()
        self.vocabulary: Tensor
        self.register_buffer("vocabulary", vocabulary.to(target.device))
        rows = target.get_output_embeddings().weight.detach()[self.vocabulary]
        self.rows = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
        self.rows.weight = nn.Parameter(rows, requires_grad=False)
        self.device, self.dtype = target.device, target.dtype
        self.name_or_path = "head"

    def state(self, before: Tensor, tokens: Tensor, places: Tensor, cache: Any) -> Tensor:
        """The states (1, T, H) at `places` (1, T), from those before and the tokens (1, T) that follow."""
        out: Tensor = self.head(before, self.embed(tokens), places, cache=cache)
        return out

    def logits(self, state: Tensor) -> Tensor:
        """(1, V) from a state (1, H); minus infinity for what the head cannot draft."""
        known = self.rows(self.head.norm(state))
        return known.new_full((1, self.config.vocab_size), float("-inf")).index_copy_(1, self.vocabulary, known)
