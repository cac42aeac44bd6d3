"""Why a speed-up falls with the context: acceptance, the cost of verifying, the cost of drafting, or fewer drafts.

Each cause is tested by a swap: what would the speed-up of decoding be in the short context if only these figures were
those of the long one? The target's own reading of the prompt is not part of it, because drafts cannot shorten it.
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


@dataclass(frozen=True, slots=True)
class RoundModel:
    """The figures of the rounds of one run; times are in decode steps of its baseline's run.

    `rates` has for each position the share of rounds with a draft there, of those that accepted all drafts before it,
    and its acceptance. `drafts` is the number of drafts per round, `width` that of the median round with drafts.
    `verify` and `draft` are the extra time of a verify pass and the time of drafting, per draft. `reading` is the time
    in which the drafter reads the prompt, per new token, and `other` the rest of a round. Of servers, `verify` is all
    extra time.
    """

    rates: tuple[tuple[float, float], ...]
    drafts: float
    width: float
    verify: float
    draft: float = 0.0
    reading: float = 0.0
    other: float = 0.0

    @classmethod
    def of(cls, ours: Run, theirs: Run) -> Self | None:
        """The figures of a run beside its baseline's, or None if they are not known."""
        passes, speeds = ours.target_forwards or ours.rounds, [one.decode_tokens_per_second for one in (ours, theirs)]
        if ours.drafted is None or ours.accepted is None or not passes or not ours.new_tokens:
            return None
        pairs, drafts = ours.accepted_by_position or ((ours.accepted, ours.drafted),), ours.drafted / passes
        before = [passes, *(kept for kept, _ in pairs)]
        found = zip(before, pairs, strict=False)
        rates = tuple((tried / left, kept / tried) for left, (kept, tried) in found if tried and left)
        if ours.generation is not None and theirs.generation is not None:
            costs = _local_costs(ours.generation, theirs.generation)
            return None if costs is None else cls(rates, drafts, **costs)
        if speeds[0] is None or speeds[1] is None:
            return None
        extra = ours.new_tokens / passes * speeds[1] / speeds[0] - 1
        return cls(rates, drafts, drafts, extra / drafts) if drafts else cls(rates, 0, 0, 0, other=extra)

    @property
    def speedup(self) -> float:
        """The speed-up of decoding that follows from these figures."""
        tokens = chance = 1.0
        for share, accepted in self.rates:
            chance *= share * accepted
            tokens += chance
        spent = 1 + self.drafts * (self.verify + self.draft) + self.other
        return 1 / (max(spent, 1e-3) / tokens + self.reading)

    def rates_with(self, other: Self) -> tuple[tuple[float, float], ...]:
        """The rates with the acceptance of another run. Positions that it never tried get that of its last one."""
        known = [accepted for _, accepted in other.rates or self.rates]
        return tuple((share, known[min(place, len(known) - 1)]) for place, (share, _) in enumerate(self.rates))


def _local_costs(ours: Generation, theirs: Generation) -> dict[str, float] | None:
    """Measured without the first round, in which the target reads the prompt, and without the round that took longest
    to draft, in which the drafter does. Forward passes are medians, because a busy machine delays some of them.
    """
    rounds = [(timing, len(step.drafted)) for step, timing in zip(ours.steps, ours.timings, strict=False)]
    steps = [timing.total for timing in theirs.timings[1:]]
    if len(rounds) < 3 or not steps or not (step := median(steps)):
        return None
    longest = max(rounds, key=lambda one: one[0].drafting)
    later = [one for one in rounds[1:] if one is not longest]
    drafting = [one for one in later if one[1]]
    width, drafts = median([count for _, count in drafting] or [0]), sum(count for _, count in drafting)
    reading = longest[0].drafting - median(timing.drafting for timing, _ in later)
    return {
        "width": width,
        "verify": (median(one.verifying for one, _ in drafting) / step - 1) / width if drafts else 0.0,
        "draft": sum(one.drafting for one, _ in drafting) / step / drafts if drafts else 0.0,
        "reading": max(0.0, reading) / step / len(ours.tokens),
        "other": sum(one.other + one.drafting * (not count) for one, count in later) / step / len(later),
    }


ACCEPTANCE, VERIFYING, DRAFTING, FEWER = "acceptance", "verifying", "drafting", "fewer drafts"
# Without drafts in the long context, their acceptance and costs are not known.
SWAPS: dict[str, Callable[[RoundModel, RoundModel], RoundModel]] = {
    ACCEPTANCE: lambda short, long: replace(short, rates=short.rates_with(long)),
    VERIFYING: lambda short, long: replace(short, verify=long.verify) if long.width else short,
    DRAFTING: lambda short, long: replace(short, draft=long.draft, reading=long.reading) if long.width else short,
    FEWER: lambda short, long: replace(short, rates=long.rates_with(short), drafts=long.drafts),
}


def models_of(results: Sequence[RaceResult]) -> dict[tuple[int, int], RoundModel]:
    """The known models of an arm's runs by text and repeat."""
    models = {(one.item.number, one.repeat): RoundModel.of(one.ours[0], one.theirs[0]) for one in results if one.theirs}
    return {key: model for key, model in models.items() if model is not None}


def cause_effects(short: Sequence[RaceResult], long: Sequence[RaceResult]) -> dict[str, Any]:
    """By cause, the `factor` by which it alone changes the speed-up of decoding from the short to the long context, and
    its 95 % `interval` over the texts, which are the same in both. Empty where the figures are not known.
    """
    before, after, effects = models_of(short), models_of(long), {}
    for name, swap in SWAPS.items():
        groups: dict[int, list[float]] = {}
        for key in before.keys() & after.keys():
            groups.setdefault(key[0], []).append(swap(before[key], after[key]).speedup / before[key].speedup)
        if groups:
            found = speedup_interval([sorted(group) for _, group in sorted(groups.items())])
            effects[name] = {
                "factor": found.estimate,
                "interval": [found.low, found.high] if found.is_bounded else None,
            }
    return effects


def lowers(effect: Row | None) -> bool:
    """Whether a cause lowers the speed-up: noticeably, and with the whole interval below 1."""
    return bool(effect and effect["interval"] and effect["interval"][1] < 1 and effect["factor"] <= 1 - NOTICEABLE)


def main_cause(rows: Sequence[Row]) -> tuple[str, Row] | None:
    """The cause that lowers the speed-up most in the longest context, and the row of the longest context in which it is
    not distinguishable. None if there is no such cause. `rows` are those of one arm by context.

    Tests from the longest context to shorter ones, until one is not distinguishable, keep the error of a single test.
    """
    causes = {name: effect for name, effect in rows[-1]["causes"].items() if lowers(effect)}
    if not causes:
        return None
    name = min(causes, key=lambda cause: float(causes[cause]["factor"]))
    return name, next(row for row in reversed(rows) if not lowers(row["causes"].get(name)))
