"""Costs: what drafting and verifying take on this machine, in units of one decode step of the target.

They are measured once and then frozen as a setting, so that adaptive gamma makes the same choices on another day or
machine: no decoder ever reads a clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

DIGITS = 3
MAX_COST = 1000.0
SHOWN_DRAFTS = (1, 2, 3, 4, 8, 16)
LEAF = "leaf"  # in the table of draft costs: what a leaf of a comb adds to a verify pass beyond a draft of the chain


@dataclass(frozen=True, slots=True)
class Costs:
    """A table of costs, in decode steps.

    verify: extra time of a verify pass with 1, 2, ... drafts over a decode step. draft: (drafter kind, time of one
    draft).
    """

    verify: tuple[float, ...] = ()
    draft: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, verify: Sequence[float], draft: Mapping[str, float]) -> Self:
        """From measured values, rounded to the digits that are shown."""
        return cls(tuple(map(_rounded, verify)), tuple((kind, _rounded(cost)) for kind, cost in draft.items()))

    @property
    def text(self) -> str:
        """The costs in words, with a few verify costs: a table of all of them would fill several lines."""
        shown = [k for k in SHOWN_DRAFTS if k <= len(self.verify)]
        verify = ", ".join(f"{k}: {self.verify[k - 1]:.2f}" for k in shown)
        parts = [f"verifying k drafts costs 1 + (k={verify}) target forwards"] if shown else []
        parts += [f"one draft by {kind} {cost:.2f}" for kind, cost in self.draft if kind != LEAF]
        parts += [f"a leaf {cost:.2f} more than a draft" for kind, cost in self.draft if kind == LEAF]
        return "; ".join(parts) or "nothing was measured"

    def verify_cost(self, drafts: int) -> float:
        """The extra time of a verify pass with this many drafts, extrapolated by the last difference. 0 if nothing
        was measured.
        """
        costs = self.verify or (0.0,)
        if drafts <= len(costs):
            return costs[drafts - 1] if drafts else 0.0
        # Not negative: an extrapolated pass must not cost less than the widest measured one.
        slope = max(0.0, costs[-1] - costs[-2] if len(costs) > 1 else costs[-1])
        return costs[-1] + (drafts - len(costs)) * slope

    def pass_cost(self, drafts: int, leaves: int = 0) -> float:
        """The extra time of a verify pass with this many drafts in a chain and leaves beside it."""
        return self.verify_cost(drafts + leaves) + leaves * self.draft_cost(LEAF)

    def draft_cost(self, kind: str | None) -> float:
        """The time of one draft by this drafter kind. 0 if it was not measured."""
        return dict(self.draft).get(kind or "", 0.0)


def _rounded(cost: float) -> float:
    return round(min(MAX_COST, max(0.0, cost)), DIGITS)
