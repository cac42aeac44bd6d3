"""The convention doctor: does a drafter that reads hidden states read those that it was trained on?

The commonest mistake with published drafters is silent: layer ids off by one or the wrong side of a norm. The text
stays right, and hardly any draft is accepted. So the plausible readings of a checkpoint are compared by how often they
predict the target's own text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from itertools import combinations

import torch
from torch import Tensor

from sampling.autoregressive import autoregressive_steps
from sampling.drafters.feature_sessions import feature_session
from utils.decode.decoding import Decoding
from utils.decode.model_info import context_length
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.models.feature_drafter import Conventions, FeatureDrafter, StepwiseDrafter

OWN_PROMPT = "Explain in a few paragraphs how bread is made, from the field to the table."
TEXT_TOKENS = 256  # of the target's own text
DEPTH = 3  # drafts in a row: the first one depends on the features, further ones on what is fed back
MOVED = 17  # positions by which features are displaced to see whether the drafter uses them
PASSAGE = 4  # tokens; a passage of so many that the text has had before is not counted again
GROUP = 4  # neighbouring rounds judge the same tokens, so they count together
LEAST_GROUPS = 11  # with fewer, none of ten readings could be significantly better
# The largest probability that a reading is replaced although no other one is better. One half is divided by the number
# of readings that differ in one convention, the other by the number of those that differ in two.
SIGNIFICANCE = 0.01
Reporter = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """How often one reading of a checkpoint predicted the target's text.

    name: empty for the present one. hits: (positions, drafts) of 0 or 1; a place counts whether or not those before it
    were right, because the text itself is fed.
    """

    name: str
    conventions: Conventions
    hits: Tensor

    @property
    def agreement(self) -> tuple[float, ...]:
        """The share of positions at which each draft in a row was right."""
        return tuple(self.hits.float().mean(0).tolist())


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """readings: the present one first. better: a reading that is significantly better. displaced: the agreement of
    first drafts with features of other positions. reads_target: whether it is significantly lower than with the right
    ones.
    """

    readings: tuple[Reading, ...]
    better: Reading | None
    displaced: float
    reads_target: bool

    @property
    def positions(self) -> int:
        """The number of positions that were compared."""
        return len(self.readings[0].hits)


def silent(_: str) -> None:
    """A reporter that shows nothing."""


def own_text(target: object, prompt: list[int], count: int = TEXT_TOKENS, report: Reporter = silent) -> list[int]:
    """The prompt and the target's greedy answer, which does not end at end tokens, as far as the context reaches."""
    if (bound := context_length(target)) is not None:
        count = max(0, min(count, bound - 1 - len(prompt)))
    decoding, text = Decoding.of(None, count, end_ids=None, seed=0), list(prompt)
    for step in autoregressive_steps(prompt, ModelSession(target, rewinds=False), decoding):
        text += step.tokens
        report(f"generating text of the target: {len(text) - len(prompt)}/{count} tokens")
    return text


def examine(
    drafter: FeatureDrafter, target: object, text: list[int], start: int, *, report: Reporter = silent
) -> Diagnosis:
    """Compare the readings of a checkpoint on the target's own text, from position `start` on.

    If one is significantly better, those that differ from it in one more convention are compared with it, and so on.
    The drafter's conventions are as before afterwards; `better` is for the caller to apply. Raises UserError for a text
    that is too short, or repeats itself too much, to tell readings apart.
    """
    rounds = _new_passages(text, start)
    if len(rounds) < GROUP * LEAST_GROUPS:
        raise UserError(
            f"Only {len(rounds)} different passages of the target's text can be compared, which are too few to examine "
            f"the drafter: {GROUP * LEAST_GROUPS} are needed."
        )
    examination = _Examination(drafter, target, text, rounds, report)
    best = own = examination.reading("", drafter.conventions)
    while (better := examination.better_than(best)) is not None:
        best = better
    displaced = examination.hits(best.conventions, moved=MOVED)
    return Diagnosis(
        tuple(examination.readings),
        None if best is own else best,
        float(displaced[:, 0].float().mean()),
        _significance(best.hits, displaced) <= SIGNIFICANCE,
    )


def _new_passages(text: list[int], start: int) -> list[int]:
    """The last positions with known features of the rounds to compare.

    A text that goes round in circles would otherwise repeat a single lucky draft until it looked significant.
    """
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(PASSAGE, len(text) + 1):
        passage = tuple(text[end - PASSAGE : end])  # its last token is the first draft's
        if passage not in seen and start < end <= len(text) - DEPTH + 1:
            found.append(end - 3)
        seen.add(passage)
    return found


@dataclass(slots=True)
class _Examination:
    """rounds: see _new_passages. states: hidden states (T, H) of the text by number. readings: what was compared."""

    drafter: FeatureDrafter
    target: object
    text: list[int]
    rounds: list[int]
    report: Reporter
    states: dict[int, Tensor] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)

    def reading(self, name: str, conventions: Conventions) -> Reading:
        """Compare a reading with the text, unless it has been compared before."""
        known = next((each for each in self.readings if each.conventions == conventions), None)
        if known is None:
            self.report(f"comparing readings of the drafter: number {len(self.readings) + 1}")
            known = Reading(name, conventions, self.hits(conventions))
            self.readings.append(known)
        return known

    def better_than(self, best: Reading) -> Reading | None:
        """The best of the readings that differ from this one in one convention, if it is significantly better, or else
        of those that differ in two: one mistake can hide another.
        """
        with _reading(self.drafter, best.conventions):
            others = {name: each for name, each in self.drafter.readings().items() if each != best.conventions}
        found = self._compared(best, others)
        if (better := self._significant(best, found)) is not None:
            return better
        if all(_significance(best.hits, each.hits) <= SIGNIFICANCE for each in found):
            return None  # this one is right
        return self._significant(best, self._compared(best, _in_two(best.conventions, others)))

    def _compared(self, best: Reading, others: Mapping[str, Conventions]) -> list[Reading]:
        return [self.reading(f"{best.name}, and {name}" if best.name else name, each) for name, each in others.items()]

    def _significant(self, best: Reading, found: list[Reading]) -> Reading | None:
        """The best of these readings, if it is significantly better."""
        # By what is significant, not by the sum of hits: readings may draft blocks of different lengths.
        level = {each.name: _significance(each.hits, best.hits) for each in found}
        first = min(found, key=lambda each: level[each.name], default=None)
        return first if first is not None and level[first.name] <= SIGNIFICANCE / 2 / len(found) else None

    @torch.no_grad()
    def hits(self, conventions: Conventions, *, moved: int = 0) -> Tensor:
        """Which of up to DEPTH drafts in a row are the text's tokens (rounds, drafts). Round i knows the features up to
        i. moved: by how many positions they are displaced.
        """
        features, text = self._features(conventions.feature_layers).roll(moved, 0), self.text
        with _reading(self.drafter, conventions):
            session = feature_session(self.drafter)
            session.begin(text)
            depth = DEPTH if isinstance(self.drafter, StepwiseDrafter) else min(DEPTH, session.block_size)
            known, hits = 0, []
            for last in self.rounds:
                session.add_features(features[known : last + 1], known, last + 1)
                known = last + 1
                # The text is fed instead of the drafts, so that every position counts.
                rows = [session.feed(text[: known + 1 + step], keep=1)[0].argmax() for step in range(depth)]
                hits.append([int(row) == text[known + 1 + step] for step, row in enumerate(rows)])
                session.rewind(known)
        return torch.tensor(hits, dtype=torch.int64)

    def _features(self, layers: tuple[int, ...]) -> Tensor:
        missing = tuple(dict.fromkeys(layer for layer in layers if layer not in self.states))
        if missing:
            session = ModelSession(self.target, rewinds=False, features=missing)
            session.begin(self.text)
            session.feed(self.text, keep=1)
            features = session.take_features()
            assert features is not None
            self.states |= zip(missing, features.chunk(len(missing), dim=-1), strict=True)
        return torch.cat([self.states[layer] for layer in layers], dim=-1)


def _in_two(own: Conventions, others: Mapping[str, Conventions]) -> dict[str, Conventions]:
    """The readings that differ from `own` as two of the others do, which differ in one convention each."""
    names = [each.name for each in fields(own)]
    changes = {
        name: {key: getattr(each, key) for key in names if getattr(each, key) != getattr(own, key)}
        for name, each in others.items()
    }
    return {
        f"{one}, and {other}": replace(own, **changes[one], **changes[other])
        for one, other in combinations(changes, 2)
        if changes[one].keys().isdisjoint(changes[other])
    }


@contextmanager
def _reading(drafter: FeatureDrafter, conventions: Conventions) -> Iterator[None]:
    before = drafter.conventions
    drafter.conventions = conventions
    try:
        yield
    finally:
        drafter.conventions = before


def _significance(one: Tensor, other: Tensor) -> float:
    """The probability of so many more hits of one reading if both were equally good. Both have the same positions."""
    depth = min(one.shape[1], other.shape[1])
    differences = (one[:, :depth] - other[:, :depth]).sum(1)
    return sign_flip_test([int(group.sum()) for group in differences.split(GROUP)])


def sign_flip_test(differences: Sequence[int]) -> float:
    """The probability of so large a sum, or a larger one, if the sign of each difference were a fair coin: the exact
    paired permutation test.
    """
    sums = Counter({0: 1})
    for difference in differences:
        turned: Counter[int] = Counter()
        for total, ways in sums.items():
            turned[total + difference] += ways
            turned[total - difference] += ways
        sums = turned
    least = sum(differences)
    return float(Fraction(sum(ways for total, ways in sums.items() if total >= least), 2 ** len(differences)))
