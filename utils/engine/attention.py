"""Attention computed one query row at a time, so that the bits of a row depend only on its own past.

It is registered with transformers under NAME, and a model selects it by `set_attn_implementation(NAME)`. Each row is
one call of PyTorch's fused attention over the keys up to the row's position, exactly the call of a single decode step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from utils.decode.engine_forward import in_prefill

NAME = "row_invariant"
seen_sliding_windows: set[int | None] = set()  # recorded for the self-test
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")  # arguments of variants that are not implemented here


def row_invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with query (B, H, Q, D) to key and value (B, G, K, D), whose last Q positions are the queries' own.
    Returns (B, Q, H, D).

    Padded batches and attention that is not causal are passed on to transformers' own function, which is correct but
    not row-invariant. Raises NotImplementedError for an unknown variant of attention.
    """
    if any(kwargs.get(name) is not None for name in _UNSUPPORTED):
        raise NotImplementedError("its attention has a logit cap, a sink or a position bias")
    seen_sliding_windows.add(sliding_window)
    if in_prefill() and attention_mask is None and getattr(module, "is_causal", True):
        attention_mask = _causal_mask(query, key, sliding_window)
    # _padding_mask has returned None for a batch without padding, so a mask here means padding, or a prefill.
    if attention_mask is not None or not getattr(module, "is_causal", True):
        fallback: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return fallback
    batch, heads, count, size = query.shape
    groups, keys = key.shape[1:3]
    rows = []
    for index in range(count):
        # The cached keys come first, so query 0 may already attend to the K - Q keys before it and to its own.
        end = keys - count + index + 1
        begin = 0 if sliding_window is None else max(0, end - sliding_window)
        # The query heads of a group take the place of the query rows, because they share their keys: (B, G, H/G, D).
        packed = query[:, :, index].view(batch, groups, heads // groups, size)
        row = scaled_dot_product_attention(packed, key[:, :, begin:end], value[:, :, begin:end], scale=scaling)
        rows.append(row.reshape(batch, 1, heads, -1))
    return (rows[0] if count == 1 else torch.cat(rows, dim=1)), None


def _causal_mask(query: Tensor, key: Tensor, sliding_window: int | None) -> Tensor:
    """Which keys each query of a prefill may attend to: (1, 1, Q, K)."""
    count, keys = query.shape[2], key.shape[2]
    allowed = torch.ones(1, 1, count, keys, dtype=torch.bool, device=key.device).tril(keys - count)
    return allowed if sliding_window is None else allowed.triu(keys - count - sliding_window + 1)


def _padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return a mask only for padded batches. Otherwise the length of each row's keys already makes it causal."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    # sdpa_mask may otherwise return None and leave the masking to the is_causal flag of SDPA.
    kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    return mask


AttentionInterface.register(NAME, row_invariant_attention)
AttentionMaskInterface.register(NAME, _padding_mask)
