"""Drafting with an MTP layer in plain tensor operations, without a cache, written from the equations alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from eagle3_reference import Weights, attention, linear, mlp, rms_norm, rotated
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


def gated_attention(weights: Weights, prefix: str, x: Tensor, keys: dict[str, Any]) -> Tensor:
    """Attention of Qwen3-Next and Qwen3.5 for x (T, H): gates per number, and rotary positions on a part of a head."""
    size, eps, count = keys["head_dim"], keys["rms_norm_eps"], len(x)
    rotary, positions = int(size * keys["partial_rotary_factor"]), torch.arange(len(x))
    query, gate = linear(weights, f"{prefix}q_proj", x).view(count, -1, 2 * size).split(size, dim=-1)
    key, value = (linear(weights, f"{prefix}{name}_proj", x).view(count, -1, size) for name in "kv")

    def placed(part: Tensor, name: str) -> Tensor:
        part = rms_norm(part, 1 + weights[f"{prefix}{name}.weight"], eps)
        return torch.cat([rotated(part[..., :rotary], positions, keys["rope_theta"]), part[..., rotary:]], dim=-1)

    query, key = placed(query, "q_norm"), placed(key, "k_norm")
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
    scores = scores.masked_fill(positions[None] > positions[:, None], float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value) * torch.sigmoid(gate)
    return mixed.reshape(count, -1) @ weights[f"{prefix}o_proj.weight"].T


def qwen_expert_mlp(weights: Weights, prefix: str, x: Tensor, keys: dict[str, Any]) -> Tensor:
    """The sparse MLP of Qwen3-Next and Qwen3.5 for x (T, H)."""
    probs = (x @ weights[f"{prefix}gate.weight"].T).softmax(-1)
    rows = []
    for row, experts in enumerate(probs.topk(keys["num_experts_per_tok"]).indices.tolist()):
        parts = [probs[row, e] * mlp(weights, f"{prefix}experts.{e}.", x[row : row + 1]) for e in experts]
        rows.append(sum(parts) / probs[row, experts].sum())
    gate = torch.sigmoid(x @ weights[f"{prefix}shared_expert_gate.weight"].T)
    return torch.cat(rows) + gate * mlp(weights, f"{prefix}shared_expert.", x)


def qwen_block(weights: Weights, prefix: str, x: Tensor, keys: dict[str, Any]) -> Tensor:
    """A layer with full attention of Qwen3-Next and Qwen3.5 for x (T, H)."""
    eps = keys["rms_norm_eps"]
    normed = rms_norm(x, 1 + weights[f"{prefix}input_layernorm.weight"], eps)
    x = x + gated_attention(weights, f"{prefix}self_attn.", normed, keys)
    normed = rms_norm(x, 1 + weights[f"{prefix}post_attention_layernorm.weight"], eps)
    sparse = f"{prefix}mlp.gate.weight" in weights
    return x + (
        qwen_expert_mlp(weights, f"{prefix}mlp.", normed, keys) if sparse else mlp(weights, f"{prefix}mlp.", normed)
    )


@dataclass(frozen=True)
class Names:
    """What a family calls the parts of an MTP layer. block: its decoder layer, and the beginning of the layer's names.
    offset: what is added to the weights of norms.
    """

    token_norm: str
    state_norm: str
    join: str
    last_norm: str
    block: tuple[Callable[..., Tensor], str]
    offset: float = 0.0


DEEPSEEK = Names("enorm", "hnorm", "eh_proj", "shared_head.norm", (glm_block, ""))
QWEN = Names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", (qwen_block, "layers.0."), 1.0)


class MtpReference:
    """weights: of an MTP layer, without the prefix of all its names. keys: of config.json."""

    def __init__(self, weights: Weights, keys: dict[str, Any], names: Names = DEEPSEEK) -> None:
        self.weights, self.keys, self.names = weights, keys, names

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.names.offset + self.weights[f"{name}.weight"], self.keys["rms_norm_eps"])

    def drafts(self, features: Tensor, embedded: Tensor, count: int, *, fed_after: bool = True) -> Tensor:
        """States (count, H) of the drafts, for the output head. features: (T, H) of positions 0 .. T - 1. embedded:
        embeddings of the tokens from position 1 on. fed_after: states are fed back after the last norm.
        """
        rows, names = [], self.names
        block, prefix = names.block
        for _ in range(count):
            token, state = self.norm(names.token_norm, embedded[: len(features)]), self.norm(names.state_norm, features)
            joined = linear(self.weights, names.join, torch.cat([token, state], dim=-1))
            last = block(self.weights, prefix, joined, self.keys)[-1:]
            rows.append(self.norm(names.last_norm, last))
            features = torch.cat([features, rows[-1] if fed_after else last])
        return torch.cat(rows)
