"""How the loaded models are computed at the moment, and what is guaranteed, as screens and records state it."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineState:
    """How the models are computed at the moment.

    kind: "plain" or a name in LAYER_ENGINES. weights: the number format of the linear weights. verified: whether the
    self-test passed with this number of threads. reason: why it did not, or why the engine is plain. tested_on: the day
    of the self-test, if only one verify width was tested again at this start; otherwise empty.
    """

    kind: str
    weights: str
    verified: bool
    threads: int
    reason: str = ""
    tested_on: str = ""

    def sentence(self) -> str:
        """Return one line for the screen."""
        plural = "s" if self.threads > 1 else ""
        when = f" on {self.tested_on}, one verify width rechecked now" if self.tested_on else ""
        guarantee = f"verified{when}" if self.verified else f"not guaranteed ({self.reason})"
        # `make gpu-check` is how to change that.
        untried = "; this engine has never been run on a GPU" if self.kind == "cuda_graph" else ""
        return (
            f"{self.kind}, {self.weights} weights, {self.threads} thread{plural}; bit-identical: {guarantee}{untried}"
        )

    def figures(self) -> dict[str, Any]:
        """Return the fields for a record."""
        return asdict(self)
