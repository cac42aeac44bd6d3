"""EAGLE-3 in plain tensor operations, without a cache, written from the equations alone.

The package speculators 0.9.0 computes the same: its logits are in tests/utils/drafter_formats/fixtures/.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x (T, heads, D)."""
    size = x.shape[-1]
    angles = positions[:, None].double() / theta ** (torch.arange(0, size, 2).double() / size)
    cos, sin = (part.to(x.dtype)[:, None].repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))


def attention(
    weights: Weights, prefix: str, x: Tensor, keys: dict[str, Any], *, causal: bool = True, window: int | None = None
) -> Tensor:
    """Self-attention of x (T, E) at positions 0 .. T - 1. keys: of config.json. window: positions that are attended
    to, the row's own included.
    """
    size, eps, count = keys["head_dim"], keys["rms_norm_eps"], len(x)
    query, key, value = (linear(weights, f"{prefix}{name}_proj", x).view(count, -1, size) for name in "qkv")
    if f"{prefix}q_norm.weight" in weights:
        query = rms_norm(query, weights[f"{prefix}q_norm.weight"], eps)
        key = rms_norm(key, weights[f"{prefix}k_norm.weight"], eps)
    positions = torch.arange(count)
    query, key = rotated(query, positions, keys["rope_theta"]), rotated(key, positions, keys["rope_theta"])
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
    if causal:
        scores = scores.masked_fill(positions[None] > positions[:, None], float("-inf"))
    if window:
        scores = scores.masked_fill(positions[None] <= positions[:, None] - window, float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return mixed.reshape(count, -1) @ weights[f"{prefix}o_proj.weight"].T


def mlp(weights: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return (silu(x @ gate) * (x @ up)) @ down


class Eagle3Reference:
    """weights: by the names of the speculators layout. keys: of the layers' config. flags: of the EAGLE-3 config."""

    def __init__(self, weights: Weights, keys: dict[str, Any], flags: dict[str, Any], layers: int) -> None:
        self.weights, self.keys, self.flags, self.layers = weights, keys, flags, layers

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.keys["rms_norm_eps"])

    def fused(self, features: Tensor) -> Tensor:
        """States (T, H) of features (T, F)."""
        if "input_norm.weight" in self.weights:
            features = self.norm("input_norm", features)
        count = sum(name.startswith("fc_norm.") for name in self.weights)
        if count:
            parts = features.chunk(count, dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], dim=-1)
        return linear(self.weights, "fc", features)

    def pass_(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Draft logits (T, V') and the states that are fed back (T, H), all rows anew."""
        weights, before = self.weights, self.flags.get("norm_before_residual")
        for index in range(self.layers):
            name = f"layers.{index}"
            joins = index == 0 or f"{name}.hidden_norm.weight" in weights  # DeepSpec's layers are all alike
            x, residual = self.norm(f"{name}.input_layernorm", embedded if joins else states), states
            if joins:
                normed = self.norm(f"{name}.hidden_norm", states)
                x, residual = torch.cat([x, normed], dim=-1), normed if before else states
            sliding = self.keys.get("layer_types", ["full_attention"] * self.layers)[index] == "sliding_attention"
            window = self.keys["sliding_window"] if sliding else None
            states = residual + attention(weights, f"{name}.self_attn.", x, self.keys, window=window)
            states = states + mlp(weights, f"{name}.mlp.", self.norm(f"{name}.post_attention_layernorm", states))
        normed = self.norm("norm", states)
        read = states if self.flags.get("no_head_norm") else normed
        return read @ weights["lm_head.weight"].T, normed if self.flags.get("norm_output") else states

    def drafts(self, features: Tensor, embedded: Tensor, count: int) -> list[Tensor]:
        """Draft logits (V',) of `count` steps. features: (T, F) of positions 0 .. T - 1. embedded: embeddings of the
        tokens from position 1 on, at least T + count - 1 of them.
        """
        states, rows, known = self.fused(features), [], len(features)
        for step in range(count):
            logits, fed = self.pass_(states, embedded[: known + step])
            rows.append(logits[-1])
            states = torch.cat([states, fed[-1:]])
        return rows

    def block(self, features: Tensor, embedded: Tensor, count: int) -> Tensor:
        """Draft logits (K, V') of P-EAGLE. features: as for `drafts`. embedded: T + K - 1 embeddings, the last ones of
        the mask token.
        """
        unknown = self.weights["mask_hidden"].view(1, -1).expand(count - 1, -1)
        return self.pass_(self.fused(torch.cat([features, unknown])), embedded)[0][-count:]
