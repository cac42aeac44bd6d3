"""Attention of a drafter that is unrolled over several drafts, with or without a sliding window.

It is registered with transformers under NAME. Its cost grows with the window and not with the length of the text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "unrolled"


def unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attend with N entries of step s, (B, H, N, D), to keys and values of steps 0 to s, (B, G, (s + 1) N, D).

    An entry attends to the entries of step 0 up to its own place, and to its own entries of later steps. Returns
    (B, N, H, D).
    """
    heads, count, size = query.shape[1:]
    groups, later = key.shape[1], key.shape[2] // count - 1
    window = sliding_window or count + later
    width = min(window, count)
    blocks = -(-count // width)

    def cut(states: Tensor) -> Tensor:
        """(..., blocks, width, D) of (..., N, D)."""
        padded: Tensor = pad(states, (0, 0, 0, blocks * width - count))
        return padded.reshape(*padded.shape[:-2], blocks, width, size)

    def in_reach(states: Tensor) -> Tensor:
        """(B, G, 1, blocks, K, D): the entries of step 0 in a block and in the one before it, if there are several."""
        own = cut(states[:, :, None, :count])
        return own if blocks == 1 else torch.cat([pad(own, (0, 0, 0, 0, 1, 0))[..., :-1, :, :], own], dim=-2)

    query = query * (scaling or size**-0.5)
    rows = cut(query.unflatten(1, (groups, heads // groups)))  # (B, G, H/G, blocks, width, D)
    keys, values = in_reach(key), in_reach(value)
    allowed = _allowed(blocks, width, window - later, query.device)
    scores = [(rows @ keys.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))]
    steps = [slice(count * step, count * (step + 1)) for step in range(1 + max(0, later - window), 1 + later)]
    scores += [(rows * cut(key[:, :, None, step])).sum(-1, keepdim=True) for step in steps]
    first, *own = torch.cat(scores, dim=-1).softmax(-1).split([keys.shape[-2], *[1] * len(steps)], dim=-1)
    result = first @ values
    for probs, step in zip(own, steps, strict=True):
        result = result + probs * cut(value[:, :, None, step])
    return result.flatten(1, 2).flatten(2, 3)[:, :, :count].transpose(1, 2), None


def _allowed(blocks: int, width: int, reach: int, device: torch.device) -> Tensor:
    """(blocks, width, K): which entries of step 0 the rows attend to: the `reach` last ones, their own included."""
    count = width if blocks == 1 else 2 * width
    column = torch.arange(count, device=device)
    distance = column[-width:, None] - column
    exists = (column >= count - width) | (torch.arange(blocks, device=device)[:, None, None] > 0)
    return exists & (distance >= 0) & (distance < reach)


AttentionInterface.register(NAME, unrolled_attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
