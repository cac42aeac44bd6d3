"""Drafting from what was said before: prompt lookup and suffix decoding, whichever kind of matches is handed in."""

from ngram_assisted.prompt_lookup import Found, Matches
from sampling.adaptive_gamma import DraftLength, Mark
from sampling.drafters.model import Draft, Verified, agreed


class MatchDrafter:
    """matches: it is told the prompt and every new token, and never reset here. length: drafts no more than pay."""

    def __init__(self, matches: Matches, *, length: DraftLength | None = None) -> None:
        self._matches, self._length = matches, length
        self._sent: Found = []

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._matches.part()
        self._matches.extend(prompt)
        if context != prompt:  # what an encoder has read
            self._matches.part()
            self._matches.extend(context)

    def propose(self, context: list[int], count: int) -> Draft:
        found = self._matches.drafts(count)
        if self._length is not None:
            found = found[: self._length.best(_marks(found))]
        self._sent = found
        return Draft([token for token, _ in found], matched=[size for _, size in found])

    def commit(self, context: list[int], verified: Verified) -> None:
        new = context[verified.start :]
        if self._length is not None:
            self._length.learn(_marks(self._sent), agreed([token for token, _ in self._sent], new))
        self._sent = []
        self._matches.extend(new)


def _marks(found: Found) -> list[Mark]:
    return [("size", size) for _, size in found]
