"""N-gram storages: which token followed a context most often, over plain ints, in constant time per token.

A k-gram is a context of k-1 tokens and the token behind it. The storages know neither models nor text; what is entered, and when, is the
n-gram drafter's business.
"""

from collections.abc import Sequence

from utils.bounds import MAX_ORDER, MIN_ORDER
from utils.errors import UserError


class _Followers:
    """What followed one context: counts by token in the order first seen, and the leader (highest count, then first seen)."""

    __slots__ = ("counts", "leader")

    def __init__(self) -> None:
        self.counts: dict[int, list[int]] = {}  # token -> [count, rank of first sight]
        self.leader = -1

    def add(self, token: int) -> None:
        seen = self.counts.setdefault(token, [0, len(self.counts)])
        seen[0] += 1
        if self.leader == -1 or self._outranks(seen, self.counts[self.leader]):
            self.leader = token

    @staticmethod
    def _outranks(seen: list[int], leading: list[int]) -> bool:
        return seen[0] > leading[0] or (seen[0] == leading[0] and seen[1] < leading[1])


class NGramStorage:
    """Counts k-grams for every k in 2..n and answers from the longest known context, down to a single token.

    n: the largest order, 2..16. vocab_size: ids run from 0 to vocab_size - 1. Raises UserError for either out of range.
    """

    def __init__(self, n: int, vocab_size: int) -> None:
        if not isinstance(n, int) or not MIN_ORDER <= n <= MAX_ORDER:
            raise UserError(f"n-gram order {n} is out of range: a whole number from {MIN_ORDER} to {MAX_ORDER}.")
        if vocab_size < 1:
            raise UserError(f"A vocabulary of {vocab_size} tokens is too small: at least 1.")
        self.n, self.vocab_size = n, vocab_size
        self._levels: dict[int, dict[tuple[int, ...], _Followers]] = {size: {} for size in self._context_sizes()}

    def initialize(self, ids: Sequence[int]) -> None:
        """Enter every k-gram of a token sequence; what was stored before stays."""
        for index in range(1, len(ids)):
            self.update(ids[max(0, index - self.n + 1) : index], [ids[index]])

    def update(self, ids: Sequence[int], next_tokens: list[int]) -> None:
        """Count each of `next_tokens` once as a follower of the context `ids` (its last n-1 ids matter).

        Raises UserError for a token outside the vocabulary; nothing is then entered.
        """
        for token in next_tokens:
            if not 0 <= token < self.vocab_size:
                raise UserError(f"Token id {token} is outside the vocabulary, 0 to {self.vocab_size - 1}.")
        if not next_tokens:
            return
        for size, level in self._levels.items():
            if size > len(ids):
                continue
            context = tuple(ids[len(ids) - size :])
            followers = level.get(context)
            if followers is None:
                followers = level[context] = _Followers()
            for token in next_tokens:
                followers.add(token)

    def next_token(self, ids: Sequence[int]) -> int | None:
        """The most frequent follower of the longest known context, the first seen among equals; None where none is known."""
        for size, level in self._levels.items():
            if size <= len(ids) and (followers := level.get(tuple(ids[len(ids) - size :]))):
                return followers.leader
        return None

    def has_gram(self, gram: Sequence[int]) -> bool:
        """Whether this k-gram (context, then token) was entered."""
        followers = self._levels.get(len(gram) - 1, {}).get(tuple(gram[:-1]))
        return followers is not None and gram[-1] in followers.counts

    def reset(self) -> None:
        """Forget everything."""
        for level in self._levels.values():
            level.clear()

    def _context_sizes(self) -> Sequence[int]:
        """Context lengths that are kept, longest first."""
        return range(self.n - 1, 0, -1)


class OneLevelNGramStorage(NGramStorage):
    """Counts n-grams of the one order n only; a shorter or unknown context has no answer."""

    def _context_sizes(self) -> Sequence[int]:
        return (self.n - 1,)
