"""DFlash, DFlash2, JetSpec and DSpark in plain tensor operations, without a cache, written from the equations alone."""

from __future__ import annotations

from typing import Any

import torch
from eagle3_reference import Weights, mlp, rms_norm, rotated
from torch import Tensor


def sees(rule: str, window: int, place: int, slot: int) -> bool:
    """Whether a slot attends to a place, both counted from the first slot, so that the context has negative places."""
    if rule == "speculators":  # the same part of the context for all slots, and the slots up to the own one
        return -window <= place <= slot
    if rule == "speculators, not causal":
        return place >= -window
    if rule == "specforge":  # the window ends at the slot, and never cuts the block
        return place <= slot and (place >= 0 or slot - place < window)
    if rule == "zlab, not causal":
        return place >= 0 or slot - place < window
    if rule == "causal":
        return place <= slot
    return True


class DFlashReference:
    """weights: by the names of the z-lab layout. keys: of the layers' config. rules: of the layers' attention, see
    `sees`.
    """

    def __init__(self, weights: Weights, keys: dict[str, Any], rules: tuple[str, ...], window: int = 0) -> None:
        self.weights, self.keys, self.rules, self.window = weights, keys, rules, window

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.keys["rms_norm_eps"])

    def heads(self, name: str, x: Tensor, norm: str = "") -> Tensor:
        """A projection (T, heads, D), with a norm for each head."""
        projected = (x @ self.weights[f"{name}_proj.weight"].T).view(len(x), -1, self.keys["head_dim"])
        return self.norm(norm, projected) if norm else projected

    def states(self, features: Tensor, embedded: Tensor) -> Tensor:
        """States (B, H) of the slots. features: (S, F) of all positions before them. embedded: (B, H) of the slots."""
        context, states = self.norm("hidden_norm", features @ self.weights["fc.weight"].T), embedded
        for index, rule in enumerate(self.rules):
            normed, name = self.norm(f"layers.{index}.input_layernorm", states), f"layers.{index}.attention_conv"
            attended = self.attention(
                f"layers.{index}.self_attn", context, self.convolved(name, normed, normed, 0), rule
            )
            states = states + self.convolved(name, normed, attended, 1)
            normed, name = self.norm(f"layers.{index}.post_attention_layernorm", states), f"layers.{index}.mlp_conv"
            output = mlp(self.weights, f"layers.{index}.mlp.", self.convolved(name, normed, normed, 0))
            states = states + self.convolved(name, normed, output, 1)
        return self.norm("norm", states)

    def convolved(self, name: str, driver: Tensor, x: Tensor, side: int) -> Tensor:
        """DFlash2's convolution of x (B, H), whose changes depend on driver (B, H): out_i,c is the sum over taps t of
        (base_t,c + delta_i,t,g(c)) x_i-t,c. side: 0 before, 1 after the part of the layer.
        """
        if f"{name}.base_kernel" not in self.weights:
            return x
        base = self.weights[f"{name}.base_kernel"]
        delta = driver @ self.weights[f"{name}.kernel_projection.weight"].T
        taps, groups, output = base.shape[1], delta.shape[1] // (2 * base.shape[1]), torch.zeros_like(x)
        for slot in range(len(x)):
            for tap in range(min(taps, slot + 1)):
                for channel in range(x.shape[1]):
                    change = delta[slot, (side * taps + tap) * groups + channel * groups // x.shape[1]]
                    output[slot, channel] += (base[side, tap, channel] + change) * x[slot - tap, channel]
        return output

    def selected(self, logits: Tensor, state: Tensor, previous: int, count: int) -> dict[int, float]:
        """DFlash2's scores of the best candidates of a draft, by token. logits: (V,). state: (H,)."""
        known = self.weights["candidate_selector.hidden_projection.weight"] @ state
        known = known * self.weights["candidate_selector.predecessor_codebook"][previous]
        best = sorted(range(len(logits)), key=logits.tolist().__getitem__)[-count:]
        successors = self.weights["candidate_selector.successor_codebook"]
        return {token: (logits[token] + known @ successors[token]).item() for token in best}

    def attention(self, name: str, context: Tensor, slots: Tensor, rule: str) -> Tensor:
        known, rows, theta = len(context), torch.cat([context, slots]), self.keys["rope_theta"]
        positions = torch.arange(len(rows))
        query = rotated(self.heads(f"{name}.q", slots, f"{name}.q_norm"), positions[known:], theta)
        key = rotated(self.heads(f"{name}.k", rows, f"{name}.k_norm"), positions, theta)
        value, repeats = self.heads(f"{name}.v", rows), query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / self.keys["head_dim"] ** 0.5
        for slot in range(len(slots)):
            hidden = [not sees(rule, self.window, place - known, slot) for place in range(len(rows))]
            scores[:, slot, torch.tensor(hidden)] = float("-inf")
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return mixed.reshape(len(slots), -1) @ self.weights[f"{name}.o_proj.weight"].T

    def bias(self, previous: int) -> Tensor:
        """What the Markov head adds to draft logits (V',) after a token."""
        return self.weights["markov_head.markov_w2.weight"] @ self.weights["markov_head.markov_w1.weight"][previous]

    def confidence(self, state: Tensor, previous: int) -> float:
        """The estimated probability that the draft of a state (H,) after a token is accepted."""
        weight = self.weights["confidence_head.proj.weight"][0]
        known = torch.cat([state, self.weights["markov_head.markov_w1.weight"][previous]])[: len(weight)]
        return float(torch.sigmoid(weight @ known + self.weights["confidence_head.proj.bias"][0]))
