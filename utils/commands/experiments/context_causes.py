"""Why a speed-up falls with the context: acceptance, the cost of verifying, the cost of drafting, or fewer drafts.

Each run is reduced to a few figures of its rounds. A cause is tested by a swap: what would the speed-up of decoding be
in the short context if only these figures were those of the long one? The prompt that the target reads is not part of
it, because drafts cannot shorten it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Self

from utils.commands.experiments.races import RaceResult
from utils.commands.shared.result_tables import Row
from utils.comparison.arms import Run
from utils.comparison.speed_claims import NOTICEABLE
from utils.metrics.intervals import speedup_interval
from utils.metrics.results import Generation

Rates = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RoundModel:
    """The figures of the rounds of one run; times are in decode steps of the target's run of the same prompt.

    `reached` is the share of rounds with a draft at each position, of those that accepted all drafts before it, and
    `accepted` the acceptance there. `drafts` is their number per round, and `width` that of a usual round with drafts.
    `verify` and `draft` are the extra time of a verify pass and the time of drafting for each draft, or None without
    drafts. `reading` is the time in which the drafter reads the prompt, per new token, and `other` the rest of a round.
    Of servers, `verify` is all extra time.
    """

    reached: Rates
    accepted: Rates
    drafts: float
    width: float
    verify: float | None
    draft: float | None
    reading: float = 0.0
    other: float = 0.0

    @classmethod
    def of(cls, ours: Run, theirs: Run) -> Self | None:
        """The figures of a run beside its baseline's, or None if they are not known."""
        passes = ours.target_forwards or ours.rounds
        if ours.drafted is None or ours.accepted is None or not passes:
            return None
        reached, accepted = _positions(ours.accepted_by_position or ((ours.accepted, ours.drafted),), passes)
        drafts = ours.drafted / passes
        if ours.generation is not None and theirs.generation is not None:
            costs = _local_costs(ours.generation, theirs.generation)
            return None if costs is None else cls(reached, accepted, drafts, **costs)
        speeds = ours.decode_tokens_per_second, theirs.decode_tokens_per_second
        if not all(speeds) or not ours.new_tokens:
            return None
        extra = ours.new_tokens / passes * speeds[1] / speeds[0] - 1  # type: ignore[operator]
        return cls(reached, accepted, drafts, drafts, extra / drafts if drafts else None, None)

    @property
    def verify_cost(self) -> float | None:
        """The time of a usual verify pass with drafts; of servers, of a round."""
        return None if self.verify is None else 1 + self.verify * self.width

    @property
    def speedup(self) -> float:
        """The speed-up of decoding that follows from these figures."""
        tokens = chance = 1.0
        for reached, accepted in zip(self.reached, self.accepted, strict=False):
            chance *= reached * accepted
            tokens += chance
        spent = 1 + self.drafts * ((self.verify or 0.0) + (self.draft or 0.0)) + self.other
        return 1 / (max(spent, 1e-3) / tokens + self.reading)

    def with_acceptance(self, other: Self) -> Self:
        return replace(self, accepted=_extended(other.accepted or self.accepted, len(self.reached)))

    def with_verifying(self, other: Self) -> Self:
        return replace(self, verify=self.verify if other.verify is None else other.verify)

    def with_drafting(self, other: Self) -> Self:
        return replace(self, draft=self.draft if other.draft is None else other.draft, reading=other.reading)

    def with_drafts(self, other: Self) -> Self:
        accepted = _extended(self.accepted, len(other.reached))
        return replace(self, reached=other.reached, accepted=accepted, drafts=other.drafts)


def _positions(pairs: Sequence[tuple[int, int]], rounds: int) -> tuple[Rates, Rates]:
    before, reached, accepted = rounds, [], []
    for kept, tried in pairs:
        if not before or not tried:
            break
        reached.append(tried / before)
        accepted.append(kept / tried)
        before = kept
    return tuple(reached), tuple(accepted)


def _extended(rates: Rates, length: int) -> Rates:
    """The acceptance at this many positions: positions that were never tried get that of the last one."""
    return (*rates, *rates[-1:] * (length - len(rates)))


def _local_costs(ours: Generation, theirs: Generation) -> dict[str, Any] | None:
    """Measured in the rounds after the first one, which reads the prompt, and without the round that took longest to
    draft: there the drafter reads it. Times of forward passes are medians, because a busy machine delays some of them.
    """
    rounds = [(timing, len(step.drafted)) for step, timing in zip(ours.steps, ours.timings, strict=False)]
    steps = [timing.total for timing in theirs.timings[1:]]
    if len(rounds) < 3 or not steps or not (step := median(steps)):
        return None
    longest = max(rounds, key=lambda one: one[0].drafting)
    later = [one for one in rounds[1:] if one is not longest]
    drafting = [one for one in later if one[1]]
    drafts, width = sum(count for _, count in drafting), median([count for _, count in drafting] or [0])
    reading = longest[0].drafting - median(timing.drafting for timing, _ in later)
    other = sum(timing.other + timing.drafting * (not count) for timing, count in later)
    return {
        "width": width,
        "verify": (median(timing.verifying for timing, _ in drafting) / step - 1) / width if drafts else None,
        "draft": sum(timing.drafting for timing, _ in drafting) / step / drafts if drafts else None,
        "reading": max(0.0, reading) / step / len(ours.tokens),
        "other": other / step / len(later),
    }


ACCEPTANCE, VERIFYING, DRAFTING, FEWER = "acceptance", "verifying", "drafting", "fewer drafts"
SWAPS: dict[str, Callable[[RoundModel, RoundModel], RoundModel]] = {
    ACCEPTANCE: RoundModel.with_acceptance,
    VERIFYING: RoundModel.with_verifying,
    DRAFTING: RoundModel.with_drafting,
    FEWER: RoundModel.with_drafts,
}


def cause_effects(short: Sequence[RaceResult], long: Sequence[RaceResult]) -> dict[str, Any]:
    """By cause, the `factor` by which it alone changes the speed-up of decoding from the short to the long context, and
    its 95 % `interval` over the texts, which are the same in both. Empty where the figures are not known.
    """
    models = {(one.item.number, one.repeat): RoundModel.of(one.ours[0], one.theirs[0]) for one in short if one.theirs}
    groups: dict[str, dict[int, list[float]]] = {name: {} for name in SWAPS}
    for one in long:
        before = models.get((one.item.number, one.repeat))
        after = RoundModel.of(one.ours[0], one.theirs[0]) if one.theirs else None
        if before is not None and after is not None:
            for name, swap in SWAPS.items():
                ratio = swap(before, after).speedup / before.speedup
                groups[name].setdefault(one.item.number, []).append(ratio)
    effects = {name: speedup_interval([*ratios.values()]) for name, ratios in groups.items() if ratios}
    return {
        name: {"factor": found.estimate, "interval": [found.low, found.high] if found.is_bounded else None}
        for name, found in effects.items()
    }


def lowers(effect: Row | None) -> bool:
    """Whether a cause lowers the speed-up: noticeably, and with the whole interval below 1."""
    return bool(effect and effect["interval"] and effect["interval"][1] < 1 and effect["factor"] <= 1 - NOTICEABLE)


def main_cause(rows: Sequence[Row]) -> tuple[str, Row] | None:
    """The cause that lowers the speed-up most in the longest context, and the row of the longest context in which it is
    not distinguishable. None if there is no such cause.

    `rows` are those of one arm by context. Contexts are tested from the longest to shorter ones until one is not
    distinguishable, so that several tests of one cause together keep the error of one.
    """
    causes = {name: effect for name, effect in rows[-1]["causes"].items() if lowers(effect)}
    if not causes:
        return None
    name = min(causes, key=lambda cause: float(causes[cause]["factor"]))
    return name, next(row for row in reversed(rows) if not lowers(row["causes"].get(name)))
