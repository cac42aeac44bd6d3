"""Causal attention whose rows have the same bits at every verify width, and a faster form for prefills.

In row mode every query row attends to keys padded to a multiple of 64 positions, with a mask. The shape of its
products then depends on its own position alone. All rows with the same padded keys are one call: `packed` puts them
side by side as queries of the same keys, which reads the keys once; `batched` gives each row a batch entry of its own.
Which of them is used is found out by a test with the model's shapes. With several threads neither may keep the bits of
a single row: then one thread computes the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from utils.decode.engine_forward import MAX_WIDTH
from utils.decode.kv_cache import PADDING
from utils.engine.threads import torch_threads

PREFILL_ROWS = 256  # query rows per call: few, because a call reads all keys up to its last row for each row
_EVERY_ROWS = range(1, MAX_WIDTH + 1)  # some shapes differ at a single width
_FEW_ROWS = (1, 2, 3, 5, 9, 17, 33, MAX_WIDTH)
_EVERY_KEYS = (64, 128, 512, 1088)  # PyTorch's kernel takes 512 keys at a time
_TESTED_ROWS = dict.fromkeys(range(PADDING, 576, PADDING), _FEW_ROWS) | dict.fromkeys(_EVERY_KEYS, _EVERY_ROWS)
_TESTED_GROUPS = 8  # heads with keys of their own are computed one by one, so that fewer show the same bits


@dataclass(frozen=True, slots=True)
class HeadShape:
    """heads: of the queries. groups: of the keys and values. size: of a head. scaling: of the scores."""

    heads: int
    groups: int
    size: int
    scaling: float


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows first..last (exclusive) that attend to the keys begin..end, and their mask (rows, end - begin)."""

    first: int
    last: int
    begin: int
    end: int
    mask: Tensor


def row_groups(past: int, count: int, window: int | None) -> list[RowGroup]:
    """The groups of `count` rows after `past` positions. begin and end are multiples of PADDING."""
    rows = [(row, past + row + 1) for row in range(count)]
    groups = []
    for (begin, end), members in groupby(rows, key=lambda row: _bounds(row[1], window)):
        chosen = list(members)
        mask = _mask(range(past + chosen[0][0], past + chosen[-1][0] + 1), range(begin, end), window)
        groups.append(RowGroup(chosen[0][0], chosen[-1][0] + 1, begin, end, mask))
    return groups


def prefill_groups(past: int, count: int, window: int | None) -> list[RowGroup]:
    """Like `row_groups`, for many rows: keys are not padded."""
    groups = []
    for first in range(0, count, PREFILL_ROWS):
        last = min(first + PREFILL_ROWS, count)
        begin = 0 if window is None else max(0, past + first + 1 - window)
        mask = _mask(range(past + first, past + last), range(begin, past + last), window)
        groups.append(RowGroup(first, last, begin, past + last, mask))
    return groups


def _bounds(end: int, window: int | None) -> tuple[int, int]:
    begin = 0 if window is None else max(0, end - window)
    return begin // PADDING * PADDING, -(-end // PADDING) * PADDING


def _mask(rows: range, keys: range, window: int | None) -> Tensor:
    """What is added to the scores (rows, keys) of these positions: 0 or minus infinity."""
    own, other = torch.arange(rows.start, rows.stop)[:, None], torch.arange(keys.start, keys.stop)[None]
    forbidden = other > own
    if window is not None:
        forbidden |= other <= own - window
    return torch.zeros(len(rows), len(keys)).masked_fill_(forbidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class RowAttention:
    """How rows of one head shape are computed. packed: see the module docstring. threads: None for as many as are set;
    a prefill always has those.
    """

    shape: HeadShape
    packed: bool
    threads: int | None = None

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, groups: Sequence[RowGroup], *, prefill: bool
    ) -> Tensor:
        """Attend with query (rows, H, D) of one sequence to its keys and values (G, S, D). Returns (rows, H * D).

        groups: of `row_groups`, or of `prefill_groups` for a prefill.
        """
        if prefill:
            return self._attend(self.prefill, query, keys, values, groups=groups)
        with torch_threads(self.threads):
            return self._attend(self.rows, query, keys, values, groups=groups)

    def _attend(
        self, form: Callable[..., Tensor], query: Tensor, keys: Tensor, values: Tensor, *, groups: Sequence[RowGroup]
    ) -> Tensor:
        parts = []
        for group in groups:
            chosen = (keys[None, :, group.begin : group.end], values[None, :, group.begin : group.end])
            parts.append(form(query[group.first : group.last], *chosen, group.mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Like `rows`, for many rows, whose bits depend on their number."""
        mixed = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask[None, None],
            scale=self.shape.scaling,
            enable_gqa=self.shape.groups < self.shape.heads,
        )
        return mixed[0].transpose(0, 1).reshape(len(query), -1)

    def rows(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """query: (rows, H, D), keys and values: (1, G, S, D), mask: (rows, S). Returns (rows, H * D)."""
        rows, shape = len(query), self.shape
        repeats = shape.heads // shape.groups
        # The query heads that share keys take the place of query rows: (rows, G, H/G, D).
        grouped = query.view(rows, shape.groups, repeats, shape.size)
        if not self.packed:
            keys, values = (part.expand(rows, -1, -1, -1) for part in (keys, values))
            each = mask[:, None, None]
            mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=each, scale=shape.scaling)
            return mixed.reshape(rows, -1)
        flat = grouped.transpose(0, 1).reshape(1, shape.groups, rows * repeats, shape.size)
        wide_mask = mask if repeats == 1 else mask.repeat_interleave(repeats, dim=0)
        mixed = scaled_dot_product_attention(flat, keys, values, attn_mask=wide_mask[None, None], scale=shape.scaling)
        return mixed.view(shape.groups, rows, repeats, shape.size).transpose(0, 1).reshape(rows, -1)


def chosen_attention(shape: HeadShape) -> RowAttention:
    """The fastest form of attention whose rows keep their bits here, with the number of threads that is set now."""
    return _chosen(shape, torch.get_num_threads())


@cache
def _chosen(shape: HeadShape, threads: int) -> RowAttention:
    """Takes a fraction of a second."""
    forms = (RowAttention(shape, packed=True), RowAttention(shape, packed=False))
    return next(filter(is_row_invariant, forms), RowAttention(shape, packed=False, threads=1))


def is_row_invariant(how: RowAttention) -> bool:
    """Whether every row has the same bits at every tested width as when it is computed alone."""
    generator = torch.Generator().manual_seed(0)
    groups = min(how.shape.groups, _TESTED_GROUPS)
    shape = replace(how.shape, heads=how.shape.heads // how.shape.groups * groups, groups=groups)
    how = replace(how, shape=shape)
    query = torch.randn(MAX_WIDTH, shape.heads, shape.size, generator=generator)
    for count, widths in _TESTED_ROWS.items():
        keys, values = torch.randn(2, 1, shape.groups, count, shape.size, generator=generator)
        mask = _mask(range(max(0, count - MAX_WIDTH), max(count, MAX_WIDTH)), range(count), None)
        single = (how.rows(query[row : row + 1], keys, values, mask[row : row + 1]) for row in range(MAX_WIDTH))
        alone = torch.cat([*single])
        if not all(torch.equal(how.rows(query[:n], keys, values, mask[:n]), alone[:n]) for n in widths):
            return False
    return True
