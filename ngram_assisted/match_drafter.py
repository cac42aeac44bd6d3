"""Drafts from text seen before: prompt lookup or suffix decoding, depending on the index it is given."""

from typing import Protocol

from ngram_assisted.matches import Match, buckets_of
from sampling.adaptive_gamma import AdaptiveGamma
from utils.decode.drafts import Draft, DraftEvidence, Verified, matching_prefix


class MatchIndex(Protocol):
    """A growing text that proposes how it may continue."""

    def separate(self) -> None:
        """What follows is a different text: no match may span both."""

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""

    def drafts(self, count: int) -> list[Match]:
        """At most `count` tokens that may follow."""


class MatchDrafter:
    """Drafts what an index of earlier text predicts.

    index: receives the prompt and every new token, and is never reset here. adaptive: chooses the number of drafts.
    """

    def __init__(self, index: MatchIndex, *, adaptive: AdaptiveGamma | None = None, observed: bool = False) -> None:
        self._index, self._adaptive, self._observed = index, adaptive, observed
        self._round: list[Match] = []

    def begin(self, prompt: list[int], context: list[int]) -> None:
        if self._adaptive is not None:
            self._adaptive.begin(prompt, context)
        self._index.separate()
        self._index.extend(prompt)
        if context != prompt:  # the prompt went to an encoder
            self._index.separate()
            self._index.extend(context)

    def propose(self, context: list[int], count: int) -> Draft:
        matches = self._index.drafts(count)
        if self._adaptive is not None:
            self._adaptive.follow(context)
            matches = matches[: self._adaptive.best(buckets_of(matches))]
        self._round = matches
        evidence = DraftEvidence(match_lengths=[match.length for match in matches]) if self._observed else None
        return Draft([match.token for match in matches], evidence=evidence)

    def commit(self, context: list[int], verified: Verified) -> None:
        new = context[verified.start :]
        if self._adaptive is not None:
            accepted = matching_prefix([match.token for match in self._round], new)
            self._adaptive.learn(buckets_of(self._round), accepted)
        self._round = []
        self._index.extend(new)
