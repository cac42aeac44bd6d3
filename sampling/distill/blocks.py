"""The pass of a block drafter over blocks at many places of a text, as its training needs it.

It computes what `DFlash.block_logits` computes for one block, with gradients, and up to the states.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from utils.drafter_formats.dflash import UNLIMITED, DFlash, Window, keys_and_values, queries_of

CHUNK = 32  # blocks that attend together, to all of the text that one of them attends to


def block_states(drafter: DFlash, features: Tensor, embedded: Tensor, anchors: range) -> Tensor:
    """The states (B, M, S, H) after the final norm, of blocks of S slots that begin at M ascending positions `anchors`.

    features (B, N, F): of positions 0 to N - 1; a block reads those before its anchor. embedded (B, M, S, H): the
    embeddings of the slots.
    """
    count, slots = features.shape[1], embedded.shape[2]
    context = drafter.hidden_norm(drafter.fc(features))
    places = (torch.tensor(anchors)[:, None] + torch.arange(slots)).flatten().to(features.device)
    positions = torch.arange(max(count, anchors[-1] + slots), device=features.device)
    tables = torch.cat(drafter.rotary(embedded, positions[None]))  # (2, T, D)
    states = embedded.flatten(1, 2)
    for layer, window in zip(cast(Any, drafter.layers), drafter.windows, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(states)
        known = keys_and_values(attention, context, tables[:, :count])
        own = keys_and_values(attention, normed, tables[:, places])
        queries = queries_of(attention, normed, tables[:, places])
        states = states + attention.o_proj(_attend(queries, known, own, anchors=anchors, window=window))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
    return cast(Tensor, drafter.norm(states)).view_as(embedded)


def _attend(
    queries: Tensor,
    known: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    *,
    anchors: range,
    window: Window | None,
) -> Tensor:
    """Attention of all slots (B, M x S, heads, D) to keys and values of the context before their block,
    (B, N, groups, D), and to those of their own block, (B, M x S, groups, D). Returns (B, M x S, heads x D).
    """
    slots, groups = queries.shape[1] // len(anchors), own[0].shape[2]
    shared, parts = queries.shape[2] // groups, []
    for begin in range(0, len(anchors), CHUNK):
        chunk = anchors[begin : begin + CHUNK]
        rows = slice(begin * slots, (begin + len(chunk)) * slots)
        context = range(0 if window is None else max(0, chunk[0] - window.size), chunk[-1])
        keys, values = (
            torch.cat([before[:, context.start : context.stop], block[:, rows]], dim=1).transpose(1, 2)
            for before, block in zip(known, own, strict=True)
        )
        mask = _mask(chunk, slots, context, window).to(queries.device)
        # The query heads of a group share its keys and take the place of further query rows.
        packed = queries[:, rows].transpose(1, 2).unflatten(1, (groups, shared)).flatten(2, 3)
        attended = scaled_dot_product_attention(packed, keys, values, attn_mask=mask.repeat(shared, 1))
        parts.append(attended.unflatten(2, (shared, -1)).flatten(1, 2).transpose(1, 2).flatten(2))
    return torch.cat(parts, dim=1)


def _mask(anchors: range, slots: int, context: range, window: Window | None) -> Tensor:
    """Which positions of the context, and which slots of all blocks, the slots of these blocks attend to."""
    anchor, position, slot = torch.tensor(anchors)[:, None], torch.tensor(context), torch.arange(len(anchors) * slots)
    before = (position < anchor) & (position >= anchor - (UNLIMITED if window is None else window.size))
    block = slot[:, None] // slots == slot // slots
    if window is not None and window.causal:
        block &= slot <= slot[:, None]
    return torch.cat([before.repeat_interleave(slots, dim=0), block], dim=1)
