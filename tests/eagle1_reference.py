"""EAGLE (also EAGLE-2 and HASS) in plain tensor operations, without a cache, written from the equations alone."""

from __future__ import annotations

from typing import Any

import torch
from eagle3_reference import Weights, attention, linear, mlp, rms_norm
from torch import Tensor


class Eagle1Reference:
    """weights: by the names of SafeAILab's layout, with the optional norms of speculators'. keys: of the layers'
    config. head: the target's output head (V, H).
    """

    def __init__(self, weights: Weights, keys: dict[str, Any], head: Tensor, layers: int) -> None:
        self.weights, self.keys, self.head, self.layers = weights, keys, head, layers

    def normed(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights.get(f"{name}.weight")
        return x if weight is None else rms_norm(x, weight, self.keys["rms_norm_eps"])

    def drafts(self, features: Tensor, embedded: Tensor, count: int) -> list[Tensor]:
        """Logits (V,) of `count` drafts. features: (T, H) of positions 0 .. T - 1, after the target's final norm.
        embedded: embeddings of the tokens from position 1 on.
        """
        rows = []
        for _ in range(count):
            joined = torch.cat([self.normed("embedding_layernorm", embedded[: len(features)]), features], dim=-1)
            x = linear(self.weights, "fc", joined)
            for index in range(self.layers):
                name = f"layers.{index}"
                sliding = self.keys.get("layer_types", ["full_attention"] * self.layers)[index] == "sliding_attention"
                window, normed = (
                    self.keys["sliding_window"] if sliding else None,
                    self.normed(f"{name}.input_layernorm", x),
                )
                x = x + attention(self.weights, f"{name}.self_attn.", normed, self.keys, window=window)
                x = x + mlp(self.weights, f"{name}.mlp.", self.normed(f"{name}.post_attention_layernorm", x))
            result = self.normed("pre_lm_head_layernorm", x[-1:])
            rows.append(result[0] @ self.head.T)
            features = torch.cat([features, result])
        return rows
