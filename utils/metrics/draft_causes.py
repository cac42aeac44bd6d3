"""Why fewer drafts are accepted than should be: measured and expected counts by position, and the cause that both show.

All comparisons of an examination are tested together. The signs of whole prompts are flipped at random and the largest
statistic of all comparisons counts (Westfall and Young 1993). So a sound drafter gets a cause with a probability of at
most ALARM, however many positions and kinds of texts are compared, and however they depend on each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, inf, sqrt

import numpy as np

from utils.metrics.intervals import SEED, STUDENT, Floats

ALARM = 0.01  # the maximum probability of any cause if the drafter is sound
MARGIN = 0.05  # smaller losses of acceptance are not counted: number formats and batches round differently
FLIPS = 20_000
SERIOUS = 0.5  # a drafter is called sound if no position can have lost this share of its expected acceptance
LEAST_RATE = 0.1  # positions with a lower expected acceptance cannot show such a loss
FEWEST, MOST = 12, 1000  # prompts: with fewer, no loss is significant among dozens of comparisons
ODD = 0.75  # a measured acceptance below this share of the expected one is called a cliff, not a slow decline

GREEDY, SAMPLED, LONG, TEMPLATE = "greedy", "sampled", "long context", "other template"
Counts = Sequence[tuple[float, float]]  # (accepted, verified) for each draft position


class DraftCause(StrEnum):
    """The verdicts. They differ in the texts and the positions at which acceptance is lost."""

    OFF = "off"
    FIRST = "first draft"
    LATER = "cliff"
    LONG = "long contexts"
    SAMPLED = "sampling"
    GREEDY_DRAFTS = "greedy drafts"
    TEMPLATE = "template"
    UNCLEAR = "not distinguishable"
    SLOW = "sound, but slow"
    SOUND = "sound"


@dataclass(frozen=True, slots=True)
class Probe:
    """Texts of one kind. `measured` and `expected` have the counts of each prompt, on the same texts.

    `greedy` are those expected if the drafts were the drafter's likeliest tokens although the text is sampled.
    """

    name: str
    measured: Sequence[Counts]
    expected: Sequence[Counts]
    greedy: Sequence[Counts] = ()


@dataclass(frozen=True, slots=True)
class Contrast:
    """The loss of acceptance at one position (from 0) of the texts of one probe.

    `low` to `high` is the 95 % confidence interval of the loss over prompts. `p` is the probability of such a loss
    beyond MARGIN at any position of any probe of a sound drafter.
    """

    probe: str
    position: int
    prompts: int
    measured: float | None
    expected: float
    loss: float
    low: float
    high: float
    p: float = 1.0

    @property
    def is_lost(self) -> bool:
        return self.p <= ALARM

    @property
    def is_open(self) -> bool:
        """Whether a serious loss may have been missed."""
        return self.measured is not None and self.expected >= LEAST_RATE and self.high > SERIOUS * self.expected

    @property
    def needed(self) -> int:
        """The number of prompts with which the interval would exclude a serious loss, or show it."""
        if self.high == inf:  # a single prompt has no interval
            return FEWEST
        room = max(abs(SERIOUS * self.expected - self.loss), MARGIN)
        return min(MOST, max(FEWEST, 2 * self.prompts, ceil(self.prompts * ((self.high - self.loss) / room) ** 2)))


def rate(counts: Sequence[Counts], position: int) -> float | None:
    """The acceptance at a position over all prompts, or None if nothing was verified there."""
    accepted, verified = _at(counts, position).sum(0)
    return float(accepted / verified) if verified else None


def _at(counts: Sequence[Counts], position: int) -> Floats:
    """(accepted, verified) of each prompt (n, 2)."""
    return np.array([one[position] if position < len(one) else (0, 0) for one in counts], float).reshape(-1, 2)


def contrasts(probes: Sequence[Probe]) -> list[Contrast]:
    """The comparisons of all probes by position, as far as drafts are expected to be verified there at least once for
    each prompt. Prompts with the same place belong together.
    """
    made, columns = list[Contrast](), list[Floats]()
    longest = max((len(probe.measured) for probe in probes), default=0)
    for probe in probes:
        for position in range(max(map(len, probe.expected), default=0)):
            expected, measured = _at(probe.expected, position), _at(probe.measured, position)
            if (total := expected[:, 1].sum()) < len(expected):
                break
            rates = np.full(len(expected), expected[:, 0].sum() / total)
            np.divide(expected[:, 0], expected[:, 1], out=rates, where=expected[:, 1] > 0)
            made.append(_contrast(probe.name, position, measured, rates))
            losses = measured[:, 1] * (rates - MARGIN) - measured[:, 0]
            columns.append(np.pad(losses, (0, longest - len(losses))))
    return [replace(one, p=p) for one, p in zip(made, family_wise(np.array(columns).T), strict=True)]


def _contrast(name: str, position: int, measured: Floats, rates: Floats) -> Contrast:
    """The loss with its interval: a ratio of sums, whose prompts are the independent values."""
    verified, count = measured[:, 1], len(rates)
    total = verified.sum()
    if not total:
        return Contrast(name, position, count, None, float(rates.mean()), 0.0, -inf, inf)
    expected, accepted = float(verified @ rates / total), float(measured[:, 0].sum() / total)
    loss = expected - accepted
    rest = verified * (rates - loss) - measured[:, 0]
    if count < 2:
        return Contrast(name, position, count, accepted, expected, loss, -inf, inf)
    width = STUDENT[min(count - 1, len(STUDENT)) - 1] * sqrt(count / (count - 1) * float(rest @ rest)) / total
    return Contrast(name, position, count, accepted, expected, loss, loss - width, loss + width)


def family_wise(losses: Floats) -> list[float]:
    """For each column of losses (prompts, comparisons), the probability that any column would be so large a sum of
    same-signed losses if the sign of each prompt's were a fair coin.
    """
    if not losses.size:
        return []
    sizes = np.sqrt((losses**2).sum(0))
    scaled = losses / np.where(sizes > 0, sizes, 1.0)
    signs = np.random.default_rng(SEED).choice((-1.0, 1.0), size=(FLIPS, len(losses)))
    largest = (signs @ scaled).max(1)
    return [float((1 + (largest >= own - 1e-9).sum()) / (FLIPS + 1)) for own in scaled.sum(0)]


def is_slower(speedups: Sequence[float]) -> bool:
    """Whether speeds are lower than those of a baseline on the same prompts. If they are equal, it is True with a
    probability of at most ALARM, by the same test.
    """
    return bool(speedups) and family_wise(-np.log([[speedup] for speedup in speedups]))[0] <= ALARM


def diagnose(probes: Sequence[Probe], found: Sequence[Contrast]) -> tuple[DraftCause, Contrast | None]:
    """The cause, and the comparison whose figures show it. The probes begin with the simplest texts."""
    if not any(one.is_lost for one in found):
        unclear = [one for one in found if one.is_open]
        if not unclear and found:
            return DraftCause.SOUND, found[0]
        return DraftCause.UNCLEAR, max(unclear, key=lambda one: one.needed, default=None)
    # There is a loss. Finding out where it begins is not a further test, so single intervals suffice.
    lost = [one for one in found if one.is_lost or one.low > MARGIN]
    first = lost[0]
    if first.probe == probes[0].name:
        return (DraftCause.LATER if first.position else DraftCause.FIRST), first
    if first.probe == SAMPLED:
        sampled = next(probe for probe in probes if probe.name == SAMPLED)
        return (DraftCause.GREEDY_DRAFTS if agrees(sampled.measured, sampled.greedy) else DraftCause.SAMPLED), first
    return (DraftCause.LONG if first.probe == LONG else DraftCause.TEMPLATE), first


def agrees(measured: Sequence[Counts], expected: Sequence[Counts]) -> bool:
    """Whether the first drafts are accepted as expected, up to MARGIN or what chance explains."""
    found = contrasts([Probe("", measured, expected)])
    return bool(found) and (found[0].low <= 0 <= found[0].high or abs(found[0].loss) <= MARGIN)
