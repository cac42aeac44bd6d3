"""Prompt lookup: the tokens after the longest earlier occurrence of the text's end (Saxena 2023, "Prompt Lookup
Decoding").
"""

from collections.abc import Iterable

from ngram_assisted.matches import Match

RECENT = 256  # earlier occurrences that are compared, the most recent ones
LONGEST = 64  # matches are not compared beyond this length


class LongestMatch:
    """Indexes the positions after every pair of tokens, and compares backwards from there. min_length: of a match.

    Among matches of equal length the most recent one wins.
    """

    def __init__(self, min_length: int = 2) -> None:
        self._min_length = min_length
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # last tokens -> positions where they ended
        self._separators = 0

    def separate(self) -> None:
        self._separators += 1
        self._text.append(-self._separators)  # unique, so that nothing matches across it

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if len(self._text) >= self._min_length:
                # Entered once the next token is known, so that the end of the text does not match itself.
                self._ends.setdefault(self._key(), []).append(len(self._text))
            self._text.append(token)

    def _key(self) -> tuple[int, ...]:
        return tuple(self._text[-self._min_length :])

    def drafts(self, count: int) -> list[Match]:
        text, longest, best = self._text, 0, 0
        if len(text) < self._min_length:
            return []
        for end in reversed(self._ends.get(self._key(), [])[-RECENT:]):
            length = self._min_length
            while length < min(end, LONGEST) and text[end - length - 1] == text[-length - 1]:
                length += 1
            if length > longest:  # ties stay with the most recent one, which came first
                longest, best = length, end
        drafts: list[Match] = []
        for token in text[best : best + count] if longest else []:
            if token < 0:  # the earlier text ended here
                break
            # Each draft lengthens the match that the next one is found by.
            drafts.append(Match(token, longest + len(drafts)))
        return drafts
