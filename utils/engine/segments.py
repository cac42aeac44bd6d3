"""What computes a decoder between one attention and the next. `utils.engine.lean_decoder` does the rest."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Segments(Protocol):
    """The parts of a decoder outside attention, for `rows` rows of any batch, on the CPU in float32.

    Results may be buffers that the next call with the same number of rows overwrites, so that callers copy what they
    keep longer: `advance` i + 1 may read the x that `advance` i returned.

    `prefill` says that rows need not have the bits of single decode steps. Otherwise a row's bits must not depend on
    the number of rows or on their values.
    """

    prefill_rows: Sequence[int]  # numbers of rows of one sequence for which a prefill is fastest, in ascending order
    row_threads: int | None  # PyTorch's threads between the parts, except in a prefill. None: as many as are set

    def begin(self, x: Tensor, *, cos: Tensor, sin: Tensor, prefill: bool) -> Tensor:
        """Return qkv of layer 0 for x (rows, hidden). cos, sin: (rows, rotary_dim) of layer 0, empty without rotary
        positions. qkv: (rows, heads + 2 * kv_heads, head_dim): the heads of the queries, keys and values, with norms
        and rotary positions applied.
        """

    def advance(
        self, layer: int, x: Tensor, attended: Tensor, *, cos: Tensor, sin: Tensor, prefill: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return x (rows, hidden) after layer `layer`, and qkv of the next layer (None after the last one).

        attended: (rows, heads * head_dim) of layer `layer`. cos, sin: of the next layer.
        """

    def logits(self, x: Tensor) -> Tensor:
        """Return the products of the output head (rows, V) with x (rows, hidden), to which the final norm was applied.
        Scale and softcap are left to the caller.
        """

    def run_products(self) -> None:
        """Compute the products of one decode step alone, on inputs of zeros: the least time that a step can take."""
