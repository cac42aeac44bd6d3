"""Match: a draft that was found in earlier text."""

from collections.abc import Sequence
from typing import NamedTuple

from sampling.adaptive_gamma import Bucket


class Match(NamedTuple):
    """A token, and how many tokens of context it was found by; 0 if it was drawn from the seed."""

    token: int
    length: int


def buckets_of(matches: Sequence[Match]) -> list[Bucket]:
    """The buckets of adaptive gamma: drafts found by longer matches are accepted more often."""
    return [("match", match.length) for match in matches]
