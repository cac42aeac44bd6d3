"""What every engine provides. `utils.engine.engine_table` lists them, `utils.engine.engine` chooses one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Report = Callable[[str], None]  # shows how far a step has got
BIT_IDENTICAL = "bit-identical at every verify width"


def unreported(text: str) -> None:
    """Show nothing."""


class LayerEngine(Protocol):
    """A way to compute the layers of the loaded models. Nothing changes before `install`.

    Reasons are clauses without a full stop, such as "it is an encoder-decoder model". An empty string means that there
    is none. After `remove`, an engine can be installed again.
    """

    promise: str  # BIT_IDENTICAL, or empty. The self-test holds the engine to it
    weights: str  # number format of the linear weights while installed
    layouts: dict[str, int]  # which layout was found to suit each weight shape; empty before the installation

    def unsupported(self) -> str:
        """Return why these models cannot be computed this way."""

    def install(self, thread_counts: Sequence[int], report: Report) -> str:
        """Replace the layers and test them with these numbers of threads. Returns why the test failed."""

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        """Replace the layers, which passed the test before, and test only one verify width again, with the number of
        threads of the last `set_threads`. Returns why the test failed.
        """

    def self_test(self, thread_count: int, report: Report) -> str:
        """Test the installed layers with another number of threads. Returns why the test failed."""

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads from now on, or from the next installation on."""

    def nbytes(self) -> int:
        """Return the bytes of the weights of all models while the engine is installed."""

    def remove(self) -> None:
        """Put the plain layers back. Does nothing if they are in place."""
