"""What every engine other than PyTorch's plain layers provides. `utils.engine.engine` lists and chooses them."""

from collections.abc import Sequence
from typing import Protocol


class LayerEngine(Protocol):
    """A way to compute the layers of the loaded models. Nothing changes before `install`.

    Reasons are clauses without a full stop, such as "it is an encoder-decoder model". An empty string means that there
    is none.
    """

    weights: str  # number format of the linear weights while installed

    def unsupported(self) -> str:
        """Return why these models cannot be computed this way."""

    def not_faster(self) -> str:
        """Return why `auto` should not choose this engine for these models."""

    def install(self, thread_counts: Sequence[int]) -> str:
        """Replace the layers and test them with these numbers of threads. Returns why the test failed."""

    def self_test(self, thread_count: int) -> str:
        """Test the installed layers with another number of threads. Returns why the test failed."""

    def remove(self) -> None:
        """Put the plain layers back. Does nothing if they are in place."""
