"""Attention computed one query row at a time, so that a row's bits depend on its own past alone.

Registered with transformers as an implementation of its own: models choose it by name. Each row is a call of PyTorch's fused attention
over the keys up to its own position, exactly the call that plain decoding makes there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "row_invariant"
asked_windows: set[int | None] = set()  # sliding windows that models asked for
_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")  # variants of attention that the rows below would get wrong


def row_invariant_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (B, H, Q, D); key, value (B, G, K, D), the last Q of them the queries' own; (B, Q, H, D).

    Raises NotImplementedError for a variant of attention that it does not know. Padded batches and attention that is not causal go
    through transformers' own function: right, but without a promise.
    """
    if any(kwargs.get(name) is not None for name in _UNKNOWN):
        raise NotImplementedError("its attention has a cap, a sink or a bias")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    asked_windows.add(sliding_window)
    batch, heads, count, size = query.shape
    groups, keys = key.shape[1:3]
    rows = []
    for index in range(count):
        end = keys - count + index + 1
        begin = 0 if sliding_window is None else max(0, end - sliding_window)
        packed = query[:, :, index].view(
            batch, groups, heads // groups, size
        )  # query heads of one group share its keys
        row = scaled_dot_product_attention(packed, key[:, :, begin:end], value[:, :, begin:end], scale=scaling)
        rows.append(row.reshape(batch, 1, heads, -1))
    return (rows[0] if count == 1 else torch.cat(rows, dim=1)), None


def _mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """None where the rows' own ends say it all; a mask where a batch is padded."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, row_invariant_attention)
AttentionMaskInterface.register(NAME, _mask)
