"""What every engine provides. `utils.engine.engine_table` lists them, `utils.engine.engine` chooses one."""

from collections.abc import Callable
from typing import Protocol

Report = Callable[[str], None]  # shows how far a step has got
BIT_IDENTICAL = "bit-identical at every verify width"
NO_PROMISE = "rounding depends on the verify width"


def unreported(text: str) -> None:
    """Show nothing."""


class LayerEngine(Protocol):
    """A way to compute the layers of some models. Nothing changes before `install`.

    Reasons are clauses without a full stop, such as "it is an encoder-decoder model". An empty string means that there
    is none. After `remove`, an engine can be installed again.
    """

    promise: str  # BIT_IDENTICAL, or empty. The self-test holds the engine to it
    weights: str  # number format of the linear weights while installed
    has_own_forward: bool  # with False set, transformers' forward pass runs over its kernels

    def unsupported(self) -> str:
        """Return why these models cannot be computed this way."""

    def need(self) -> int:
        """Return the bytes of memory that the installed engine takes beyond what the models hold without it."""

    def install(self, report: Report) -> str:
        """Replace the layers, one at a time. Returns why that is not possible."""

    def self_test(self, thread_count: int, report: Report, *, complete: bool) -> str:
        """Test what the installed layers promise, with this number of threads. Returns why the test failed.

        complete: whether to test more widths than a start does.
        """

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads from now on."""

    def nbytes(self) -> int:
        """Return the bytes of the weights of all models while the engine is installed."""

    def remove(self) -> None:
        """Put the plain layers back. Does nothing if they are in place."""
