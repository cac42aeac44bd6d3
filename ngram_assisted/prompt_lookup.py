"""Where the text's own end has been before, and what followed there: two answers, over plain ints.

LongestMatch is prompt lookup: behind the longest earlier match of the end, the latest one, it reads on. SuffixAutomaton holds every
substring with its number of occurrences, and follows the most frequent continuation (suffix decoding, arXiv 2411.04975).
"""

from collections.abc import Iterable
from typing import Protocol

Found = list[tuple[int, int]]  # (token, length of the match that proposed it)

_ENDS = 256  # earlier places that are looked at, the latest first
LONGEST = 64  # matches are not told apart beyond this


class Matches(Protocol):
    """A growing text that can say how it may go on."""

    def part(self) -> None:
        """What comes is another text: no match reaches across."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""

    def drafts(self, count: int) -> Found:
        """At most `count` tokens that may follow."""


class LongestMatch:
    """The places behind every pair of tokens; matches are compared backwards from there. least: tokens that a match must have."""

    def __init__(self, least: int = 2) -> None:
        self._least = least
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # last tokens -> where they ended
        self._parts = 0

    def part(self) -> None:
        self._parts += 1
        self._text.append(-self._parts)  # each such token occurs once

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if len(self._text) >= self._least:
                self._places.setdefault(self._end(), []).append(len(self._text))
            self._text.append(token)

    def _end(self) -> tuple[int, ...]:
        return tuple(self._text[-self._least :])

    def drafts(self, count: int) -> Found:
        text, best, place = self._text, 0, 0
        if len(text) < self._least:
            return []
        for start in reversed(self._places.get(self._end(), [])[-_ENDS:]):
            size = self._least
            while size < min(start, LONGEST) and text[start - size - 1] == text[-size - 1]:
                size += 1
            if size > best:
                best, place = size, start
        drafts: Found = []
        for token in text[place : place + count] if best else []:
            if token < 0:
                break
            drafts.append((token, best + len(drafts)))
        return drafts


class SuffixAutomaton:
    """The smallest automaton of all substrings (Blumer et al. 1985), built token by token, each state with its number of occurrences.

    A token takes amortised constant time, and as much again as states end where it does.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._latest = [0]  # where the state's strings ended last: breaks ties
        self._last, self._parts = 0, 0
        self.size = 0  # tokens, ends of texts among them

    def part(self) -> None:
        self._parts += 1
        self._add(-self._parts)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._add(token)

    def _add(self, token: int) -> None:
        self.size += 1
        new = self._state({}, self._length[self._last] + 1, 0, 0)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._linked(state, token)
        self._last = new
        while new > 0:  # all suffixes end here once more
            self._count[new] += 1
            self._latest[new] = self.size
            new = self._link[new]

    def _linked(self, state: int, token: int) -> int:
        """The state of the longest suffix that has been here before, parted from longer strings where it is among them."""
        child = self._next[state][token]
        if self._length[child] == self._length[state] + 1:
            return child
        twin = self._state(dict(self._next[child]), self._length[state] + 1, self._count[child], self._link[child])
        self._latest[twin] = self._latest[child]
        self._link[child] = twin
        while state >= 0 and self._next[state].get(token) == child:
            self._next[state][token] = twin
            state = self._link[state]
        return twin

    def _state(self, following: dict[int, int], length: int, count: int, link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._count.append(count)
        self._link.append(link)
        self._latest.append(0)
        return len(self._next) - 1

    def drafts(self, count: int) -> Found:
        state = self._link[self._last] if self._last else 0  # the longest suffix that was there before
        drafts: Found = []
        size = self._length[state] if state > 0 else 0
        while len(drafts) < count and state > 0:
            token, state = self._following(state)
            if token < 0:
                break
            drafts.append((token, size))
            size += 1
        return drafts

    def _following(self, state: int) -> tuple[int, int]:
        """The token that most often follows, the latest among equals, and the state behind it; -1 where nothing but ends do."""
        known = (
            (self._count[child], self._latest[child], token, child)
            for token, child in self._next[state].items()
            if token >= 0
        )
        return max(known, default=(0, 0, -1, 0))[2:]
