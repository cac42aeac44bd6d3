"""Linear kernels in which the bits of an output row do not depend on how many rows are computed at once.

A kernel stores a weight (N, K) in its own layout and computes x @ weight.T + bias for x (..., K). Which layout is
row-invariant differs between machines, so `is_row_invariant` tries it on the spot. The self-test then checks whole
models.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from utils.decode.engine_forward import in_prefill

# oneDNN generates and keeps machine code for every number of rows, half a megabyte each. So only these sizes are used:
# a size in between is padded with zero rows to the next one, and more rows than the largest size are computed in
# blocks.
UNPADDED_ROWS = 9
BLOCK_SIZES = (*range(1, UNPADDED_ROWS + 1), 12, 16, 18, 24, 32)
MAX_ROWS = BLOCK_SIZES[-1]
# In a prefill, where rows need not have the bits of single decode steps.
PREFILL_SIZES = (32, 64, 96, 128, *range(192, 513, 64))
_LAYOUT_ROWS = 8  # oneDNN optimizes its layout for this number of rows; with 1, rows depend on their number
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of parts of the inner dimension, the fewest first
# Every block size, and numbers of rows that are padded to the next one.
_TESTED_ROWS = (1, *BLOCK_SIZES[1:], 10, 13, 17, 25)
TESTED_OUTPUTS = 4096  # of a weight with more outputs, every number of rows is tried on so many
_CONFIRMED_ROWS = (2, 5, UNPADDED_ROWS)  # and these on all of it, because how a sum is split may depend on the outputs


class Kernel(Protocol):
    """A weight (N, K) and the product with it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N)."""

    def weight(self) -> Tensor:
        """Return the weight (N, K): the original values, or the rounded ones of a kernel that rounds."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield what the kernel keeps in memory."""


KernelBuilder = Callable[
    [Tensor, Tensor | None], Kernel | None
]  # (weight, bias) -> None if the layer must stay as it is


class PackedKernel:
    """float32 on a CPU, packed once in oneDNN's layout. Plain PyTorch packs in every call with more than one row.

    On some machines oneDNN splits the sums over a long inner dimension differently for different numbers of rows.
    Splitting them here into `parts` equal parts, which are added in order, leaves oneDNN nothing to split.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int) -> None:
        self._bias, self._size = bias, weight.shape[1] // parts
        slices = torch.split(weight.detach(), self._size, dim=1)
        self._parts = [torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _LAYOUT_ROWS) for part in slices]
        self._whole = self._parts[0] if parts == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        # More rows than UNPADDED_ROWS, whatever the leading dimensions of x are.
        if x.numel() > UNPADDED_ROWS * x.shape[-1]:
            return _in_blocks(self.product, x)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Multiply without padding or blocks."""
        if self._whole is not None:
            whole: Tensor = _LINEAR(x, self._whole, self._bias, "none", [], "")
            return whole
        pieces = torch.split(x, self._size, dim=-1)
        total: Tensor = _LINEAR(pieces[0], self._parts[0], self._bias, "none", [], "")
        for part, piece in zip(self._parts[1:], pieces[1:], strict=True):
            total.add_(_LINEAR(piece, part, None, "none", [], ""))
        return total

    def weight(self) -> Tensor:
        return torch.cat([part.to_dense() for part in self._parts], dim=1)

    def tensors(self) -> Iterator[Tensor]:
        yield from (*self._parts, *_given(self._bias))


class BlockedKernel:
    """Any device and number format: rows are padded to full blocks, so that the same PyTorch kernel always runs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return _in_blocks(lambda block: linear(block, self._weight, self._bias), x, (MAX_ROWS,))

    def weight(self) -> Tensor:
        return self._weight

    def tensors(self) -> Iterator[Tensor]:
        yield from (self._weight, *_given(self._bias))


def packed_kernel_builder(thread_counts: Iterable[int], known: dict[str, int]) -> KernelBuilder:
    """Return a function that packs a weight into the fewest parts that are row-invariant here, or returns None if there
    are none.

    known: numbers of parts by weight shape; 0 if there is none. A shape that it lacks is tried with each of these
    numbers of threads, and added to it.
    """
    counts = tuple(thread_counts)

    def build(weight: Tensor, bias: Tensor | None) -> Kernel | None:
        inputs, shape = weight.shape[1], "x".join(map(str, weight.shape))
        if shape not in known:
            fitting = (parts for parts in SPLITS if inputs % parts == 0)
            known[shape] = next((parts for parts in fitting if _keeps_bits(weight, parts, counts)), 0)
        parts = known[shape]
        return PackedKernel(weight, bias, parts) if parts and inputs % parts == 0 else None

    return build


def _keeps_bits(weight: Tensor, parts: int, thread_counts: Sequence[int]) -> bool:
    """Whether a weight that is split into so many parts is row-invariant here."""
    tried, inputs = weight[:TESTED_OUTPUTS], weight.shape[1]
    if not is_row_invariant(PackedKernel(tried, None, parts), inputs, thread_counts):
        return False
    whole = None if len(tried) == len(weight) else PackedKernel(weight, None, parts)
    return whole is None or is_row_invariant(whole, inputs, thread_counts, _CONFIRMED_ROWS)


def is_row_invariant(
    kernel: Kernel, inputs: int, thread_counts: Iterable[int], tested: Sequence[int] = _TESTED_ROWS
) -> bool:
    """Whether every row of these numbers of rows has the same bits as when it is computed alone."""
    x = torch.randn(max(tested), inputs, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    # Computed once, with the current number of threads, because the bits must not depend on that number either.
    alone = torch.cat([kernel(x[row : row + 1]) for row in range(len(x))])
    try:
        for count in thread_counts:
            torch.set_num_threads(count)
            if not all(torch.equal(kernel(x[:rows]), alone[:rows]) for rows in tested):
                return False
    finally:
        torch.set_num_threads(before)
    return True


def _given(bias: Tensor | None) -> tuple[Tensor, ...]:
    return () if bias is None else (bias,)


def _in_blocks(product: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int] = BLOCK_SIZES) -> Tensor:
    """Apply the product to blocks of the largest size. The last block is padded with zeros to the next size."""
    sizes = PREFILL_SIZES if in_prefill() else sizes
    rows = x.reshape(-1, x.shape[-1])
    count, largest = len(rows), sizes[-1]
    rest = count % largest
    missing = next(size for size in sizes if size >= rest) - rest if rest else 0
    padded = pad(rows, (0, 0, 0, missing)) if missing else rows
    products = [product(block) for block in torch.split(padded, largest)]
    return (products[0] if len(products) == 1 else torch.cat(products))[:count].view(*x.shape[:-1], -1)


# The overload itself, so that calls skip its resolution. The arguments after the bias name a fused activation: none.
_LINEAR = torch.ops.mkldnn._linear_pointwise.default
