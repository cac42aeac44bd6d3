"""What every engine other than PyTorch's plain layers provides. `utils.engine.engine` lists and chooses them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Report = Callable[[str], None]  # shows how far a step has got
BIT_IDENTICAL = "bit-identical at every verify width"


def unreported(text: str) -> None:
    """Show nothing."""


class LayerEngine(Protocol):
    """A way to compute the layers of the loaded models. Nothing changes before `install`.

    Reasons are clauses without a full stop, such as "it is an encoder-decoder model". An empty string means that there
    is none.
    """

    weights: str  # number format of the linear weights while installed
    layouts: dict[str, int]  # which layout was found to suit each weight shape; empty before the installation

    def unsupported(self) -> str:
        """Return why these models cannot be computed this way."""

    def not_faster(self) -> str:
        """Return why `auto` should not choose this engine for these models."""

    def install(self, thread_counts: Sequence[int], report: Report) -> str:
        """Replace the layers and test them with these numbers of threads. Returns why the test failed."""

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        """Replace the layers, which passed the test before, and test only one verify width again, with the current
        number of threads. Returns why the test failed.
        """

    def self_test(self, thread_count: int, report: Report) -> str:
        """Test the installed layers with another number of threads. Returns why the test failed."""

    def remove(self) -> None:
        """Put the plain layers back. Does nothing if they are in place."""
