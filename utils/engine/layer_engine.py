"""What every engine provides. `utils.engine.engine_table` lists them, `utils.engine.engine` chooses one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

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
        """Replace the layers, in layouts that suit these numbers of threads, and compare logits with those of the plain
        layers. Returns why that failed. The promise is tested by `self_test`.
        """

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        """Replace the layers, which passed the test before, and test only one verify width again, with the number of
        threads of the last `set_threads`. Returns why the test failed.
        """

    def self_test(self, thread_count: int, report: Report) -> str:
        """Test what the installed layers promise, with this number of threads. Returns why the test failed."""

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads from now on, or from the next installation on."""

    def nbytes(self) -> int:
        """Return the bytes of the weights of all models while the engine is installed."""

    def remove(self) -> None:
        """Put the plain layers back. Does nothing if they are in place."""


@runtime_checkable
class ParkingEngine(LayerEngine, Protocol):
    """An engine that needs nothing of the models' layers, so that it can be put aside and used again at once.

    Between `begin_trials` and `end_trials`, what was compiled is kept, for every number of threads and by `remove` as
    well, as long as there is memory.
    """

    def begin_trials(self, memory: Callable[[], int]) -> None:
        """Keep what is compiled from now on. memory: returns the bytes that are available."""

    def end_trials(self) -> None:
        """Release what is not in use."""

    def is_parked(self) -> bool:
        """Whether `resume` is possible."""

    def resume(self) -> None:
        """Compute again, in place of the plain layers or of another engine, which `remove` brings back."""
