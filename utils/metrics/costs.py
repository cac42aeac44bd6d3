"""Costs of drafting and verifying on this machine, in decode steps of the target.

They are measured once and then frozen as a setting, so that adaptive gamma makes the same choices on another day or
machine: no decoder ever reads a clock. They are measured after a short and after a longer text, because attention takes
longer in a longer context, most of all in verify passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

DIGITS = 3
MAX_COST = 1000.0
SHOWN_DRAFTS = (1, 2, 3, 4, 8, 16)
MAX_SHARE = 4.0  # limit of extrapolation, in multiples of the distance between the two context lengths
READ_TOKENS = 1000  # unit of the reading costs


@dataclass(frozen=True, slots=True)
class Costs:
    """A table of costs, in decode steps at the context length `length`, which is 0 if it is unknown.

    `verify` has the extra time of a verify pass with 1, 2, ... drafts over a decode step. `draft` has pairs of a
    drafter kind and the time of one draft, `read` of a kind and the time to read 1,000 tokens of a prompt. `longer` is
    the table of a longer context, and `step` a decode step at this length relative to one in the shortest context.
    """

    verify: tuple[float, ...] = ()
    draft: tuple[tuple[str, float], ...] = ()
    read: tuple[tuple[str, float], ...] = ()
    length: int = 0
    longer: "Costs | None" = None
    step: float = 1.0

    @classmethod
    def of(
        cls,
        verify: Sequence[float],
        draft: Mapping[str, float],
        read: Mapping[str, float] = MappingProxyType({}),
        *,
        length: int = 0,
        longer: "Costs | None" = None,
        step: float = 1.0,
    ) -> Self:
        """Costs from measured values, rounded to the shown digits."""
        drafting, reading = (tuple((kind, _rounded(cost)) for kind, cost in costs.items()) for costs in (draft, read))
        # A decode step in a longer context is never faster, so a lower value is noise.
        return cls(tuple(map(_rounded, verify)), drafting, reading, length, longer, max(1.0, _rounded(step)))

    def at(self, length: int) -> "Costs":
        """The costs in decode steps at a context length, where times grow linearly with the length."""
        longer = self.longer
        if longer is None:
            return self
        # Not much beyond the longer length: errors of the measurements would grow as well.
        share = min(MAX_SHARE, max(0.0, (length - self.length) / (longer.length - self.length)))
        step = 1 + share * (longer.step - 1)
        weight = share * longer.step / step  # times are linear in the length, but costs are not

        def between(short: float, long: float) -> float:
            return max(0.0, short + weight * (long - short))

        drafts = dict(longer.draft)
        return Costs(
            tuple(between(cost, longer.verify_cost(count)) for count, cost in enumerate(self.verify, start=1)),
            tuple((kind, between(cost, drafts.get(kind, cost))) for kind, cost in self.draft),
            tuple((kind, cost / step) for kind, cost in self.read),
            length,
            step=step,
        )

    @property
    def text(self) -> str:
        """The costs in words, with a few verify costs, because all of them would fill several lines."""
        shown = [k for k in SHOWN_DRAFTS if k <= len(self.verify)]
        verify = ", ".join(f"{k}: {self.verify[k - 1]:.2f}" for k in shown)
        parts = [f"verifying k drafts costs 1 + (k={verify}) target forwards"] if shown else []
        parts += [f"one draft by {kind} {cost:.2f}" for kind, cost in self.draft]
        parts += [f"reading 1,000 tokens by {kind} {cost:.1f}" for kind, cost in self.read]
        if self.longer is not None:
            forward = f"a target forward takes {self.longer.step:.2f} times as long"
            parts.append(f"after {self.longer.length:,} instead of {self.length:,} tokens {forward}")
            parts.append(self.longer.text)
        return "; ".join(parts) or "nothing was measured"

    def verify_cost(self, drafts: int) -> float:
        """The extra time of a verify pass with so many drafts, extrapolated by the last difference. 0 if unmeasured."""
        costs = self.verify or (0.0,)
        if drafts <= len(costs):
            return costs[drafts - 1] if drafts else 0.0
        # Not negative: an extrapolated pass must not cost less than the widest measured one.
        slope = max(0.0, costs[-1] - costs[-2] if len(costs) > 1 else costs[-1])
        return costs[-1] + (drafts - len(costs)) * slope

    def draft_cost(self, kind: str | None) -> float:
        """The time of one draft by this drafter kind. 0 if it was not measured."""
        return dict(self.draft).get(kind or "", 0.0)

    def reading_cost(self, kind: str | None, tokens: int) -> float:
        """The time in which this drafter kind reads this many tokens of a prompt. 0 if it was not measured."""
        return dict(self.read).get(kind or "", 0.0) * tokens / READ_TOKENS

    def prefill_cost(self, tokens: int) -> float:
        """A cautious estimate of the time in which the target reads this many tokens of a prompt."""
        # Half of what one more row adds to the widest verify pass: a prefill computes many rows at once. On a GPU a row
        # adds next to nothing, and so does a prompt.
        return tokens * max(0.0, self.verify_cost(len(self.verify) + 1) - self.verify_cost(len(self.verify))) / 2


def _rounded(cost: float) -> float:
    return round(min(MAX_COST, max(0.0, cost)), DIGITS)
