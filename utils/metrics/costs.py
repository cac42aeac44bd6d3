"""Costs: what drafting takes here, in units of one plain step of the target. Measured once, then frozen.

Numbers of drafts are chosen by them. They are part of the settings, so that a run can be repeated exactly on another day or machine: no
decoder ever looks at a clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DIGITS = 3
DEAREST = 1000.0


@dataclass(frozen=True, slots=True)
class Costs:
    """windows: what a verify window with 1, 2, ... drafts takes more than a plain step. steps: (kind of drafter, time of one draft)."""

    windows: tuple[float, ...] = ()
    steps: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, windows: Sequence[float], steps: Mapping[str, float]) -> "Costs":
        """Measured figures, rounded to what is shown of them."""
        return cls(
            tuple(_rounded(cost) for cost in windows), tuple((kind, _rounded(cost)) for kind, cost in steps.items())
        )

    def window(self, drafts: int) -> float:
        """What so many drafts add to a window; the last difference goes on. Nothing where nothing could be measured."""
        costs = self.windows or (0.0,)
        if drafts <= len(costs):
            return costs[drafts - 1] if drafts else 0.0
        step = max(0.0, costs[-1] - costs[-2] if len(costs) > 1 else costs[-1])
        return costs[-1] + (drafts - len(costs)) * step

    def step(self, kind: str | None) -> float:
        """What one draft of this kind of drafter takes."""
        return dict(self.steps).get(kind or "", 0.0)


def _rounded(cost: float) -> float:
    return round(min(DEAREST, max(0.0, cost)), DIGITS)
