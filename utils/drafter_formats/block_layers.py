"""Layers whose queries are the slots of a block, and whose keys are those of the context and of the block.

The states of the context enter every layer as they are. Its keys and values are kept, and those of the block are
dropped. No row of the context has a query, so a prompt of T tokens needs no mask of T x T.

Also the heads that DSpark adds: a bias for the token before a draft, and a confidence. Both depend on nothing but the
block's states and the tokens before the draft, so drafts drawn from left to right have the distribution that they are
drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import rotate_half

from utils.decode.kv_cache import GrowingLayer
from utils.drafter_formats.checkpoint import DrafterCheckpoint

MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE = "confidence_head.proj.weight"
VANILLA, GATED, RECURRENT = "vanilla", "gated", "rnn"
MARKOV_KINDS = (VANILLA, GATED, RECURRENT)


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding attention of a block.

    A slot attends to `size` positions of the context. If the window `moves`, these end at the slot, and include it and
    the earlier ones of the block (SpecForge); otherwise they end before the block for all slots (speculators). With
    `causal`, a slot attends to no later slot.
    """

    size: int
    moves: bool
    causal: bool

    def mask(self, context: int, slots: int, device: Any) -> Tensor:
        """Which of `context` + `slots` keys each slot attends to: (slots, context + slots)."""
        key = torch.arange(-context, slots, device=device)  # relative to the first slot
        slot = torch.arange(slots, device=device)[:, None]
        begin = slot - self.size + 1 if self.moves else slot.new_full((slots, 1), -self.size)
        own = key <= slot if self.causal else key < slots
        return ((key >= begin) | (key >= 0)) & own


@dataclass(frozen=True, slots=True)
class Tables:
    """Cosines and sines (T, D) of rotary positions."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: slice) -> Tables:
        return Tables(self.cos[rows], self.sin[rows])

    def rotate(self, heads: Tensor) -> Tensor:
        """Apply to heads (T, heads, D)."""
        rotated: Tensor = heads * self.cos[:, None] + rotate_half(heads) * self.sin[:, None]
        return rotated


def layer_pass(
    layer: Any, states: Tensor, context: Tensor, tables: Tables, *, kept: GrowingLayer, window: Window | None
) -> Tensor:
    """Return states (B, H) of the slots after a layer with Qwen3's modules.

    `context` has states (T, H) of new positions before the block, whose keys and values are added to `kept`. `tables`
    are those of these positions and of the block.
    """
    attention, new = layer.self_attn, len(context)
    normed = layer.input_layernorm(states)
    _remember(attention, context, tables[:new], kept)
    keys, values = _remember(attention, normed, tables[new:], kept)
    queries = tables[new:].rotate(attention.q_norm(_heads(attention.q_proj(normed), attention)))
    attended = _attend(queries, keys, values, window)
    kept.crop(-len(states))
    states = states + attention.o_proj(attended)
    output: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
    return output


def _heads(projected: Tensor, attention: Any) -> Tensor:
    """(T, heads x D) as (T, heads, D)."""
    return projected.view(len(projected), -1, attention.head_dim)


def _remember(attention: Any, states: Tensor, tables: Tables, kept: GrowingLayer) -> tuple[Tensor, Tensor]:
    """Append keys and values of states (T, H), and return all of them: (1, groups, K, D)."""
    keys = tables.rotate(attention.k_norm(_heads(attention.k_proj(states), attention)))
    values = _heads(attention.v_proj(states), attention)
    return kept.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])


def _attend(queries: Tensor, keys: Tensor, values: Tensor, window: Window | None) -> Tensor:
    """Attention of the slots (B, heads, D) to all keys (1, groups, K, D), or to those in the window: (B, heads x D)."""
    slots, heads, size = queries.shape
    mask = None
    if window is not None:
        context = min(keys.shape[2] - slots, window.size)  # no slot sees more of it
        keys, values = keys[:, :, -context - slots :], values[:, :, -context - slots :]
        # The query heads of a group share its keys and take the place of further query rows.
        mask = window.mask(context, slots, queries.device).repeat(heads // keys.shape[1], 1)
    packed = queries.transpose(0, 1).reshape(1, keys.shape[1], -1, size)
    attended = scaled_dot_product_attention(packed, keys, values, attn_mask=mask)
    return attended.view(heads, slots, size).transpose(0, 1).reshape(slots, -1)


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """The numbers of previous tokens and of draft tokens, the rank of the bias, and the size of a draft's state."""

    kind: str
    tokens: int
    drafted: int
    rank: int
    state: int


class MarkovHead(nn.Module):
    """A low-rank bias of draft logits: vanilla, w2 . w1[token before]; gated, with a gate that reads the draft's state;
    or rnn, with a memory of the drafts before it.
    """

    def __init__(self, shape: MarkovShape) -> None:
        super().__init__()
        self.kind, rank = shape.kind, shape.rank
        self.markov_w1 = nn.Embedding(shape.tokens, rank)
        self.markov_w2 = nn.Linear(rank, shape.drafted, bias=False)
        if self.kind == GATED:
            self.gate_proj = nn.Linear(shape.state + rank, rank)
        elif self.kind == RECURRENT:
            self.joint_proj = nn.Linear(2 * rank + shape.state, 3 * rank)

    def before(self, token: int) -> Tensor:
        """What is known of a token: (1, R)."""
        row: Tensor = self.markov_w1.weight[token : token + 1]
        return row

    def bias(self, token: int, state: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias (1, V') of a draft after a token, and the memory (1, R) for the next draft.

        `state` (1, H) is the draft's. `memory` follows the draft before it; None for the first one.
        """
        known = self.before(token)
        if self.kind == GATED:
            known = known * torch.sigmoid(self.gate_proj(torch.cat([state, known], dim=-1)))
        elif self.kind == RECURRENT:
            memory = torch.zeros_like(known) if memory is None else memory
            gate, candidate, output = self.joint_proj(torch.cat([memory, known, state], dim=-1)).chunk(3, dim=-1)
            memory = torch.lerp(torch.tanh(candidate), memory, torch.sigmoid(gate))
            known = torch.tanh(output)
        bias: Tensor = self.markov_w2(known)
        return bias, memory


class ConfidenceHead(nn.Module):
    """The logit of the probability that a draft is accepted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    @property
    def size(self) -> int:
        """How many numbers it reads."""
        return self.proj.in_features

    def forward(self, known: Tensor) -> float:
        """Return the probability for what is known of a draft: (1, size)."""
        return float(torch.sigmoid(self.proj(known).float()).item())


def markov_shape(checkpoint: DrafterCheckpoint, kind: str | None) -> MarkovShape | None:
    """The shape of a checkpoint's Markov head; None if it has none. kind: as declared, or None for that of its
    tensors.
    """
    first, second = (checkpoint.shapes.get(name, ()) for name in MARKOV)
    if not len(first) == len(second) == 2:
        return None
    found = GATED if checkpoint.has("markov_head.gate_proj.weight") else VANILLA
    found = RECURRENT if checkpoint.has("markov_head.joint_proj.weight") else found
    return MarkovShape(kind or found, first[0], second[0], first[1], checkpoint.shapes["hidden_norm.weight"][0])


def confidence_size(checkpoint: DrafterCheckpoint) -> int | None:
    """How many numbers a checkpoint's confidence head reads; None if it has none."""
    shape = checkpoint.shapes.get(CONFIDENCE, ())
    return shape[1] if len(shape) == 2 else None
