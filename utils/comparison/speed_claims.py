"""What may be claimed about a measured speed-up, and its wording: one rule for all reports.

A strategy is called faster or slower only if the 95 % interval of its speed-ups excludes 1 and its repeats agree.
Without accepted drafts it cannot be faster, whatever the clock shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, inf
from typing import Any, Self

from utils.metrics.intervals import FASTER as FASTER
from utils.metrics.intervals import SLOWER as SLOWER
from utils.metrics.intervals import Interval, speedup_interval
from utils.servers.kinds.completion import ServerAcceptance
from utils.text import count_of

BASELINE, TOO_FEW, NOT_DISTINGUISHABLE = "baseline", "too few", "not distinguishable"
MIN_VALUES = 5  # minimum number of speed-ups for a verdict
MAX_CHANCE = 1 / 16  # probability that equal strategies agree by chance: five repeats that all agree
NO_GAIN = 1.005  # fewer tokens per target forward are shown as 1.00
ROUGH = 0.1  # smaller differences need a second decimal
STAR = "*"  # marks the figures of a server that had other requests
OTHER_REQUESTS = (
    STAR
    + " {} had other requests during {} of {} ({} more), so its speed and what is compared with it are not its own."
)
UNKNOWN_ACCEPTANCE = "{}: its acceptance is not known, because {}."
NO_GAIN_SENTENCE = "with 1.00 tokens per target forward its drafts saved nothing"
Row = Mapping[str, Any]  # the figures of a finding


@dataclass(frozen=True, slots=True)
class SpeedClaim:
    """A speed-up over target-only and the claim that follows from it.

    `interval` is None and `verdict` is "-" if there is nothing to compare. Otherwise the verdict is BASELINE, TOO_FEW,
    FASTER, SLOWER or NOT_DISTINGUISHABLE. `without_gain` is True if the strategy drafts, but needs as many forward
    passes as the target alone.
    """

    interval: Interval | None
    verdict: str
    without_gain: bool = False

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[float]],
        *,
        baseline: bool = False,
        tokens_per_forward: float | None = None,
        these_prompts: bool = False,
    ) -> Self:
        """The claim for speed-ups grouped by prompt. `tokens_per_forward` is None for strategies without drafts.

        With `these_prompts` the claim covers only other repeats of these prompts, as in `speedup_interval`.
        """
        groups = [positive for group in groups if (positive := [value for value in group if value > 0])]
        if not groups:
            return cls(None, "-")
        interval = speedup_interval(groups, these_prompts=these_prompts)
        without_gain = tokens_per_forward is not None and tokens_per_forward < NO_GAIN
        if baseline:
            return cls(interval, BASELINE)
        if sum(map(len, groups)) < MIN_VALUES:
            return cls(interval, TOO_FEW, without_gain)
        verdict = interval.verdict
        # The repeats of one prompt must agree. Prompts may differ: the claim is about their mean.
        if verdict not in (FASTER, SLOWER) or (len(groups) == 1 and not agree(groups[0])):
            return cls(interval, NOT_DISTINGUISHABLE, without_gain)
        return cls(interval, NOT_DISTINGUISHABLE if without_gain and verdict == FASTER else verdict, without_gain)

    @property
    def figures(self) -> dict[str, Any]:
        """The claim for the JSON record. An unbounded interval is null, and the baseline has no interval."""
        interval = self.interval
        bounded = interval is not None and interval.is_bounded and self.verdict != BASELINE
        return {
            "speedup": None if interval is None else interval.estimate,
            "interval": [interval.low, interval.high] if interval is not None and bounded else None,
            "verdict": self.verdict,
            "without_gain": self.without_gain,
        }


def agree(ratios: Sequence[float]) -> bool:
    """Whether the ratios agree on one side of 1 so clearly that chance does this at most once in 16 (a sign test)."""
    above, below = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
    fewer = min(above, below) + len(ratios) - above - below  # ties count against both
    chance = 2 * sum(comb(len(ratios), count) for count in range(fewer + 1)) / 2 ** len(ratios)
    return bool(chance <= MAX_CHANCE)


def interval_text(interval: Sequence[float] | None) -> str:
    """The interval of a record in a table, or a dash."""
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def speedup_text(row: Row) -> str:
    """The speed-up of a record in a table, a dash, or "noise" where drafts cannot have caused it."""
    if row["speedup"] is None:
        return "-"
    return "noise" if row["without_gain"] and row["speedup"] > 1 else f"{row['speedup']:.2f}x{star(row)}"


def star(row: Row) -> str:
    """Marks a speed-up over or of a server that had other requests."""
    return STAR if row.get("disturbed") else ""


def server_notes(name: str, row: Row, unit: str = "answer") -> list[str]:
    """What limits the figures of a server: other requests during its answers, and why its acceptance is unknown."""
    disturbed = [tokens for tokens in row["other_tokens"] if tokens]
    lines = [UNKNOWN_ACCEPTANCE.format(name, reason) for reason in row["acceptance_unknown"]]
    if not disturbed:
        return lines
    counted = count_of(len(row["other_tokens"]), unit), count_of(sum(disturbed), "token")
    return [OTHER_REQUESTS.format(name, len(disturbed), *counted), *lines]


def reasons_unknown(found: Iterable[ServerAcceptance | None]) -> list[str]:
    """Why figures of drafts are not valid, without the numbers, which differ between answers."""
    return sorted({one.note.partition(":")[0] for one in found if one is not None and not one.valid})


def rough(speedup: float) -> str:
    """A speed-up without an interval. Near 1 it has a second decimal, so that 1.05 does not become 1.1."""
    return f"{speedup:.{1 if abs(speedup - 1) >= ROUGH else 2}f}x"


def claim_text(row: Row, over: str = "") -> str:
    """The speed-up of a record with its interval: 1.52x target-only (95 % interval 1.41 to 1.63)."""
    text = f"{row['speedup']:.2f}x{star(row)} {baseline_name(row)}"
    if (interval := row["interval"]) is None:
        return text
    return f"{text} (95 % interval {interval[0]:.2f} to {interval[1]:.2f}{over})"


def speed_sentence(row: Row) -> str:
    """A sentence on the speed of a record's strategy. It is empty for the baseline and where nothing was compared."""
    name, verdict = row["strategy"], row["verdict"]
    if verdict in (BASELINE, "-"):
        return ""
    if row["without_gain"] and row["speedup"] > 1:
        return f"{name}: {NO_GAIN_SENTENCE}, so {row['speedup']:.2f}x is noise."
    if verdict == TOO_FEW:
        return f"{name}: about {rough(row['speedup'])}{star(row)} {baseline_name(row)}, but too few runs to tell."
    if verdict == NOT_DISTINGUISHABLE:
        return f"{name}: {claim_text(row)}, {no_difference(row)}."
    return f"{name} is {verdict}: {claim_text(row)}."


def no_difference(row: Row) -> str:
    """The words for a speed-up that is not distinguishable from 1."""
    low, high = row["interval"] or (0.0, inf)
    # An interval that excludes 1 would otherwise seem to contradict them.
    why = "" if low <= 1 <= high else ", because too many of its repeats are on the other side of 1"
    return f"not distinguishable from no difference{why}"


def baseline_name(row: Row) -> str:
    """What a speed-up is relative to. Only the records of servers name it."""
    return row.get("baseline") or "target-only"
