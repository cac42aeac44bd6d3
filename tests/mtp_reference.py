"""Drafting with an MTP layer in plain tensor operations, without a cache, written from the equations alone."""

from __future__ import annotations

from typing import Any

import torch
from eagle3_reference import Weights, attention, linear, mlp, rms_norm
from torch import Tensor


def expert_mlp(weights: Weights, prefix: str, x: Tensor, keys: dict[str, Any]) -> Tensor:
    """The sparse MLP of DeepSeek-V3 and GLM-4.5 for x (T, H), with one group of experts."""
    scores = torch.sigmoid(x @ weights[f"{prefix}gate.weight"].T)
    chosen = (scores + weights[f"{prefix}gate.e_score_correction_bias"]).topk(keys["num_experts_per_tok"]).indices
    rows = []
    for row, experts in enumerate(chosen.tolist()):
        parts = [scores[row, e] * mlp(weights, f"{prefix}experts.{e}.", x[row : row + 1]) for e in experts]
        rows.append(keys["routed_scaling_factor"] * sum(parts) / scores[row, experts].sum())
    return torch.cat(rows) + mlp(weights, f"{prefix}shared_experts.", x)


def glm_block(weights: Weights, prefix: str, x: Tensor, keys: dict[str, Any]) -> Tensor:
    """A decoder layer of GLM-4.5 for x (T, H)."""
    eps = keys["rms_norm_eps"]
    normed = rms_norm(x, weights[f"{prefix}input_layernorm.weight"], eps)
    x = x + attention(weights, f"{prefix}self_attn.", normed, keys)
    normed = rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], eps)
    return x + expert_mlp(weights, f"{prefix}mlp.", normed, keys)


class MtpReference:
    """weights: of an MTP layer by DeepSeek's names, without the prefix. keys: of config.json."""

    def __init__(self, weights: Weights, keys: dict[str, Any]) -> None:
        self.weights, self.keys = weights, keys

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.keys["rms_norm_eps"])

    def drafts(self, features: Tensor, embedded: Tensor, count: int, *, fed_after: bool = True) -> Tensor:
        """States (count, H) of the drafts, for the output head. features: (T, H) of positions 0 .. T - 1. embedded:
        embeddings of the tokens from position 1 on. fed_after: states are fed back after the last norm.
        """
        rows = []
        for _ in range(count):
            joined = torch.cat([self.norm("enorm", embedded[: len(features)]), self.norm("hnorm", features)], dim=-1)
            state = glm_block(self.weights, "", linear(self.weights, "eh_proj", joined), self.keys)[-1:]
            rows.append(self.norm("shared_head.norm", state))
            features = torch.cat([features, rows[-1] if fed_after else state])
        return torch.cat(rows)
