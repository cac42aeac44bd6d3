"""Linear kernels whose rows come out the same, bit for bit, however many rows are computed at once.

A kernel holds a weight (N, K) in a layout of its own and computes x @ weight.T + bias for x (..., K). Which of them a machine keeps its
promise with is found out by asking it: `bits_agree` here, and the self-test on the whole model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

# Every number of rows has machine code of its own made for it and kept, half a megabyte each: so these must do. What is wider than the
# last goes in blocks, and what lies between is filled up with zeros.
FEW = 9
SIZES = (*range(1, FEW + 1), 12, 16, 18, 24, 32)
ROWS = SIZES[-1]
_HINT = 8  # rows that oneDNN's layout is chosen for; with 1 the bits of a row depend on its company
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
_TRIED = (*SIZES[1:], 10, 13, 17, 25)


class Kernel(Protocol):
    """A weight (N, K) and its product."""

    def __call__(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""

    def weight(self) -> Tensor:
        """The weight (N, K) as it was given; nearly so where the kernel rounded it."""


class Packed:
    """float32 on a CPU, packed once in oneDNN's layout, where plain PyTorch packs at every call with more than one row.

    On some machines the sums over a long inner dimension are cut differently by width. Cutting it here, into the fewest equal parts that
    pass a test and that are then added in order, leaves nothing to cut.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int) -> None:
        self._bias, self._size = bias, weight.shape[1] // parts
        slices = weight.detach().split(self._size, dim=1)
        self._parts = [torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _HINT) for part in slices]
        self._whole = self._parts[0] if parts == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() > FEW * x.shape[-1]:
            return _in_blocks(self._product, x)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        if self._whole is not None:
            return _PRODUCT(x, self._whole, self._bias, "none", [], "")
        total, bias = None, self._bias
        for part, piece in zip(self._parts, x.split(self._size, dim=-1), strict=True):
            product = _PRODUCT(piece, part, bias, "none", [], "")
            total, bias = product if total is None else total.add_(product), None
        assert total is not None
        return total

    def weight(self) -> Tensor:
        return torch.cat([part.to_dense() for part in self._parts], dim=1)


class Bytes:
    """Weights of one byte with a scale per output, summed in float32, on a CPU. Inputs and outputs pass through bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = weight.detach().abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self._scale = scale.bfloat16()  # the product's own format: rounding it first keeps scale and weights in step
        self._weight = (weight.detach() / self._scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y = torch.ops.aten._weight_int8pack_mm(rows, self._weight, self._scale).float().view(*x.shape[:-1], -1)
        return y if self._bias is None else y.add_(self._bias)

    def weight(self) -> Tensor:
        return self._weight.float() * self._scale.float()[:, None]


class Blocked:
    """Any device and format: always the same number of rows, filled up with zeros, so that always the same kernel runs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return _in_blocks(lambda block: linear(block, self._weight, self._bias), x, (ROWS,))

    def weight(self) -> Tensor:
        return self._weight


def packing(threads: Iterable[int]) -> Callable[[Tensor, Tensor | None], Kernel | None]:
    """How to pack weights here: shapes that were tried once are packed the same way again. None where no way keeps the bits.

    threads: the numbers of threads among which a row may not change.
    """
    found: dict[torch.Size, int | None] = {}
    counts = tuple(threads)

    def pack(weight: Tensor, bias: Tensor | None) -> Kernel | None:
        if weight.shape not in found:
            whole = (parts for parts in _PARTS if weight.shape[1] % parts == 0)
            found[weight.shape] = next(
                (parts for parts in whole if bits_agree(Packed(weight, None, parts), weight.shape[1], counts)), None
            )
        parts = found[weight.shape]
        return None if parts is None else Packed(weight, bias, parts)

    return pack


def bits_agree(kernel: Kernel, inputs: int, threads: Iterable[int]) -> bool:
    """Whether each of up to ROWS rows comes out as it does alone."""
    x = torch.randn(ROWS, inputs, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    alone = torch.cat([kernel(row) for row in x.split(1)])
    try:
        for count in threads:
            torch.set_num_threads(count)
            if not all(torch.equal(kernel(x[:width]), alone[:width]) for width in (1, *_TRIED)):
                return False
    finally:
        torch.set_num_threads(before)
    return True


def _in_blocks(product: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int] = SIZES) -> Tensor:
    """The product over blocks of the largest size; the last one is filled up with zeros to the next size."""
    rows = x.reshape(-1, x.shape[-1])
    count, largest = len(rows), sizes[-1]
    rest = count % largest
    missing = next(size for size in sizes if size >= rest) - rest if rest else 0
    filled = pad(rows, (0, 0, 0, missing)) if missing else rows
    products = [product(block) for block in filled.split(largest)]
    return (products[0] if len(products) == 1 else torch.cat(products))[:count].view(*x.shape[:-1], -1)


_PRODUCT = torch.ops.mkldnn._linear_pointwise.default
