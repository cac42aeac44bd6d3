"""Suffix decoding: the most frequent continuation of the longest suffix seen before (Oliaro et al. 2024, arXiv
2411.04975).
"""

from collections.abc import Iterable

from ngram_assisted.matches import Match


class SuffixAutomaton:
    """The smallest automaton of all substrings (Blumer et al. 1985), built token by token. Each state counts its
    occurrences.

    Adding a token takes amortised constant time, plus one step for every state whose strings end there.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # transitions by token; state 0 is the empty string
        self._link = [-1]  # suffix link: the longest suffix that is in another state
        self._length = [0]  # of the longest string of the state
        self._count = [0]
        self._latest = [0]  # position where the state's strings ended last: breaks ties
        self._last, self._separators = 0, 0
        self.size = 0  # tokens, separators included

    def separate(self) -> None:
        self._separators += 1
        self._add(-self._separators)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._add(token)

    def _add(self, token: int) -> None:
        self.size += 1
        new = self._new_state({}, self._length[self._last] + 1, 0, 0)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._suffix_state(state, token)
        self._last = new
        while new > 0:  # every suffix occurs once more
            self._count[new] += 1
            self._latest[new] = self.size
            new = self._link[new]

    def _suffix_state(self, state: int, token: int) -> int:
        """The state of the longest suffix that occurred before, split off if the state also holds longer strings."""
        child = self._next[state][token]
        if self._length[child] == self._length[state] + 1:
            return child
        # The clone takes the child's shorter strings, which from now on occur more often than the longer ones.
        clone = self._new_state(dict(self._next[child]), self._length[state] + 1, self._count[child], self._link[child])
        self._latest[clone] = self._latest[child]
        self._link[child] = clone
        while state >= 0 and self._next[state].get(token) == child:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, transitions: dict[int, int], length: int, count: int, link: int) -> int:
        self._next.append(transitions)
        self._length.append(length)
        self._count.append(count)
        self._link.append(link)
        self._latest.append(0)
        return len(self._next) - 1

    def drafts(self, count: int) -> list[Match]:
        state = self._link[self._last] if self._last else 0  # the longest suffix that occurred before
        drafts: list[Match] = []
        length = self._length[state] if state > 0 else 0
        while len(drafts) < count and state > 0:
            token, state = self._most_frequent(state)
            if token < 0:
                break
            drafts.append(Match(token, length))
            length += 1
        return drafts

    def _most_frequent(self, state: int) -> tuple[int, int]:
        """The most frequent next token, the latest among equals, and the state after it. -1 if only separators
        follow.
        """
        candidates = (
            (self._count[child], self._latest[child], token, child)
            for token, child in self._next[state].items()
            if token >= 0
        )
        return max(candidates, default=(0, 0, -1, 0))[2:]
