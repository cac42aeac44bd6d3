"""Row attention: the values of softmax attention, rows that do not depend on their number, and prefills."""

import pytest
import torch
from torch import Tensor

from utils.engine import row_attention
from utils.engine.row_attention import (
    HeadShape,
    RowAttention,
    chosen_attention,
    is_row_invariant,
    prefill_groups,
    row_groups,
)

SHAPES = [HeadShape(6, 2, 16, 0.25), HeadShape(4, 4, 8, 0.3), HeadShape(8, 1, 32, 0.2)]
CASES = [(0, 5, None), (60, 9, None), (127, 3, 40), (200, 12, 16), (63, 2, 64)]  # past, rows, window


def expected(query: Tensor, keys: Tensor, values: Tensor, shape: HeadShape, window: int | None) -> Tensor:
    """Attention in float64, one row and one head at a time. keys: (G, S, D), the last ones are the queries' own."""
    rows, length = len(query), keys.shape[1]
    result = torch.zeros(rows, shape.heads, shape.size, dtype=torch.float64)
    for row in range(rows):
        end = length - rows + row + 1
        begin = 0 if window is None else max(0, end - window)
        for head in range(shape.heads):
            group = head * shape.groups // shape.heads
            scores = keys[group, begin:end].double() @ query[row, head].double() * shape.scaling
            result[row, head] = scores.softmax(0) @ values[group, begin:end].double()
    return result.reshape(rows, -1)


def inputs(shape: HeadShape, past: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(past + rows)
    query = torch.randn(rows, shape.heads, shape.size, generator=generator)
    keys, values = torch.randn(2, shape.groups, past + rows, shape.size, generator=generator)
    return query, keys, values


def padded(part: Tensor) -> Tensor:
    """Keys or values with finite values beyond the length, as in the buffers of the cache."""
    return torch.cat([part, torch.full((len(part), 64, part.shape[2]), 7.0)], dim=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("past", "rows", "window"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_softmax_attention(shape: HeadShape, past: int, rows: int, window: int | None, packed: bool) -> None:
    query, keys, values = inputs(shape, past, rows)
    groups = row_groups(past, rows, window)
    found = RowAttention(shape, packed).attend(query, padded(keys), padded(values), groups, prefill=False)
    assert torch.allclose(found.double(), expected(query, keys, values, shape, window), atol=1e-5)


@pytest.mark.parametrize("window", [None, 30, 700])
def test_a_prefill_in_several_parts_is_softmax_attention(window: int | None) -> None:
    shape, past, rows = SHAPES[0], 17, 600
    query, keys, values = inputs(shape, past, rows)
    groups = prefill_groups(past, rows, window)
    assert len(groups) == 3
    found = RowAttention(shape, False).attend(query, padded(keys), padded(values), groups, prefill=True)
    assert torch.allclose(found.double(), expected(query, keys, values, shape, window), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_form_gives_a_row_the_same_bits_whatever_rows_follow(shape: HeadShape) -> None:
    how = chosen_attention(shape)
    query, keys, values = inputs(shape, 120, 20)
    whole = how.attend(query, padded(keys), padded(values), row_groups(120, 20, None), prefill=False)
    for row in range(20):
        end = 120 + row + 1
        one = how.attend(
            query[row : row + 1],
            padded(keys[:, :end]),
            padded(values[:, :end]),
            row_groups(end - 1, 1, None),
            prefill=False,
        )
        assert torch.equal(one[0], whole[row])


def test_a_form_whose_rows_depend_on_their_number_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowAttention.rows

    def broken(self: RowAttention, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        error = 1e-6 * (self.packed and len(query) == 33 and keys.shape[2] == 448)
        return rows(self, query, keys, values, mask) * (1 + error)

    monkeypatch.setattr(RowAttention, "rows", broken)
    assert not is_row_invariant(RowAttention(SHAPES[0], packed=True))
    assert not row_attention._chosen.__wrapped__(SHAPES[0], 1).packed


@pytest.mark.parametrize("shape", [HeadShape(7, 1, 24, 0.2), HeadShape(8, 2, 36, 0.2), HeadShape(9, 3, 64, 0.125)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_chosen_form_has_equal_bits_at_every_width(shape: HeadShape, threads: int) -> None:
    """On some machines the first shape differs at width 23 alone, if rows are packed; on others every form differs if
    two threads compute it.
    """
    torch.set_num_threads(threads)
    how, past = chosen_attention(shape), 100
    query, keys, values = inputs(shape, past, 64)
    alone = [
        how.attend(query[row : row + 1], padded(keys), padded(values), row_groups(past + row, 1, None), prefill=False)
        for row in range(64)
    ]
    for width in range(1, 65):
        groups = row_groups(past, width, None)
        rows = how.attend(query[:width], padded(keys), padded(values), groups, prefill=False)
        assert torch.equal(rows, torch.cat(alone[:width])), width
