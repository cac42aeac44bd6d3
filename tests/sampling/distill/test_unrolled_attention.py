"""Attention over the unrolled steps of a drafter, against masked attention over all of them."""

from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sampling.distill.students import unrolled_attention


@pytest.mark.parametrize("count", [5, 12, 13])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 20])
@pytest.mark.parametrize("later", [0, 1, 2])
def test_it_equals_masked_attention(count, window, later):
    """True entries up to the own place and own entries of later steps, as far as they lie in the window."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, count, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, count * (later + 1), 8, generator=generator)
    allowed = torch.zeros(count, later + 1, count, dtype=torch.bool)
    for row, step, column in product(range(count), range(later + 1), range(count)):
        is_known = column <= row if step == 0 else column == row
        allowed[row, step, column] = is_known and (row + later) - (column + step) < (window or 1000)
    shared = [part.repeat_interleave(3, 1) for part in (key, value)]
    expected = scaled_dot_product_attention(query, *shared, attn_mask=allowed.flatten(1), scale=0.3)
    found, _ = unrolled_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)
