"""What was measured of one engine with the loaded models, as it is compared, shown, stored and recorded."""

from dataclasses import asdict, dataclass
from typing import Any

COMPARED_WIDTHS = (2, 5, 9)  # verify widths at which engines are compared
PREFILL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One row of measurements.

    problem: why the engine was not measured, or only in part. failed: whether it could not be installed or failed its
    self-test; that may have a passing reason, such as memory. promise: see LayerEngine. verified: whether the self-test
    has passed with this number of threads. threads: the fastest number. steps: (number of threads, seconds of a decode
    step). step_seconds: with `threads`. costs: (verify width, time of a verify pass in decode steps). prefill: tokens
    per second of a prompt of PREFILL_TOKENS. nbytes: of the weights. measured_on: a day. Figures that were not
    measured are 0 or empty.
    """

    problem: str = ""
    failed: bool = False
    promise: str = ""
    verified: bool = False
    threads: int = 0
    steps: tuple[tuple[int, float], ...] = ()
    step_seconds: float = 0.0
    costs: tuple[tuple[int, float], ...] = ()
    prefill: float = 0.0
    nbytes: int = 0
    measured_on: str = ""

    @property
    def is_candidate(self) -> bool:
        """Whether it can be chosen."""
        return not self.problem

    def cost(self, width: int) -> float | None:
        """The time of a verify pass of this width in decode steps. None if it was not measured."""
        return dict(self.costs).get(width)

    def record(self) -> dict[str, Any]:
        """Return the fields for a record."""
        return asdict(self)
