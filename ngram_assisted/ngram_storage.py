"""N-gram storages: which token followed a context most often, over plain ints, in constant time and bounded memory.

A k-gram is a context of k-1 tokens and the token behind it. The storages know neither models nor text; what is entered, and when, is the
n-gram drafter's business; files are ngram_file's.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from utils.bounds import MAX_GRAMS, MAX_ORDER, MIN_ORDER
from utils.errors import UserError

Context = tuple[int, ...]
Scores = dict[int, int]  # token -> its score; _LEADER -> the token with the highest one
Followers = int | Scores  # an int: this token, once. Most long contexts never see more.

_LEADER = -1
_ONCE = 1 << 40  # a score counts in units of this; less than one unit breaks ties, for the first seen


class NGramStorage:
    """Counts k-grams for every k in 2..n and answers from the longest known context, down to a single token.

    n: the largest order, 2..16. vocab_size: ids run from 0 to vocab_size - 1. limit: the most k-grams held; beyond it the contexts that
    were entered first are forgotten. Raises UserError for any of them out of range.
    """

    def __init__(self, n: int, vocab_size: int, limit: int = MAX_GRAMS) -> None:
        if not isinstance(n, int) or not MIN_ORDER <= n <= MAX_ORDER:
            raise UserError(f"n-gram order {n} is out of range: a whole number from {MIN_ORDER} to {MAX_ORDER}.")
        if vocab_size < 1:
            raise UserError(f"A vocabulary of {vocab_size} tokens is too small: at least 1.")
        self.n, self.vocab_size = n, vocab_size
        self._levels: dict[int, dict[Context, Followers]] = {size: {} for size in self._context_sizes()}
        self._ages: deque[Context] = deque()  # every context once, oldest first
        self._grams = 0
        self._limit = limit
        self.limit = limit

    def __len__(self) -> int:
        """How many k-grams are held."""
        return self._grams

    @property
    def limit(self) -> int:
        """The most k-grams that are held."""
        return self._limit

    @limit.setter
    def limit(self, most: int) -> None:
        if not 1 <= most <= MAX_GRAMS:
            raise UserError(f"A limit of {most} n-grams is out of range: 1 to {MAX_GRAMS}.")
        self._limit = most
        self._forget()

    def initialize(self, ids: Sequence[int]) -> None:
        """Enter every k-gram of a token sequence; what was stored before stays.

        Raises UserError for a token outside the vocabulary; nothing is then entered.
        """
        self._check(ids)
        ids = list(ids)
        for index in range(1, len(ids)):
            for size, level in self._levels.items():
                if size <= index:
                    self._add(level, tuple(ids[index - size : index]), ids[index])
            if self._grams > self._limit:
                self._forget()

    def update(self, ids: Sequence[int], next_tokens: list[int]) -> None:
        """Count each of `next_tokens` once as a follower of the context `ids` (its last n-1 ids matter).

        Raises UserError for a token outside the vocabulary; nothing is then entered.
        """
        self._check(next_tokens)
        for size, level in self._levels.items():
            if size <= len(ids):
                context = tuple(ids[len(ids) - size :])
                for token in next_tokens:
                    self._add(level, context, token)
        if self._grams > self._limit:
            self._forget()

    def look_up(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """The most frequent follower of the longest known context, the first seen among equals, and that context's length.

        None where no context is known.
        """
        known = len(ids)
        for size, level in self._levels.items():
            if size <= known:
                followers = level.get(tuple(ids[known - size :]))
                if followers is not None:
                    return (followers if isinstance(followers, int) else followers[_LEADER]), size
        return None

    def next_token(self, ids: Sequence[int]) -> int | None:
        """The most frequent follower of the longest known context, or None."""
        found = self.look_up(ids)
        return None if found is None else found[0]

    def has_gram(self, gram: Sequence[int]) -> bool:
        """Whether this k-gram (context, then token) is held."""
        followers = self._levels.get(len(gram) - 1, {}).get(tuple(gram[:-1]))
        return followers is not None and gram[-1] in _counts(followers)

    def reset(self) -> None:
        """Forget everything."""
        for level in self._levels.values():
            level.clear()
        self._ages.clear()
        self._grams = 0

    def contexts(self) -> Iterator[tuple[Context, dict[int, int]]]:
        """Every context, oldest first, with the counts of its followers in the order first seen."""
        for context in self._ages:
            yield context, _counts(self._levels[len(context)][context])

    def restore(self, context: Context, counts: dict[int, int]) -> None:
        """Enter a new context as `contexts` gave it. Raises UserError where that is not one for this storage."""
        level = self._levels.get(len(context))
        self._check([*context, *counts])
        if level is None or context in level or not counts or min(counts.values()) < 1:
            raise UserError("it does not hold n-grams of this order")
        scores = {token: count * _ONCE - rank for rank, (token, count) in enumerate(counts.items())}
        scores[_LEADER] = max(scores, key=scores.__getitem__)
        level[context] = scores
        self._ages.append(context)
        self._grams += len(counts)
        self._forget()

    def _context_sizes(self) -> Sequence[int]:
        """Context lengths that are kept, longest first."""
        return range(self.n - 1, 0, -1)

    def _check(self, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            foreign = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise UserError(f"Token id {foreign} is outside the vocabulary, 0 to {self.vocab_size - 1}.")

    def _add(self, level: dict[Context, Followers], context: Context, token: int) -> None:
        followers = level.get(context)
        if followers is None:
            level[context] = token
            self._ages.append(context)
            self._grams += 1
            return
        if isinstance(followers, int):
            followers = level[context] = {_LEADER: followers, followers: _ONCE}
        score = followers.get(token)
        if score is None:  # the later, the lower among equals; the leader was here before
            followers[token] = _ONCE - len(followers) + 1
            self._grams += 1
            return
        followers[token] = score = score + _ONCE
        if score > followers[followers[_LEADER]]:
            followers[_LEADER] = token

    def _forget(self) -> None:
        """The oldest contexts go until what is left is within the limit."""
        while self._grams > self._limit:
            context = self._ages.popleft()
            self._grams -= len(_counts(self._levels[len(context)].pop(context)))


class OneLevelNGramStorage(NGramStorage):
    """Counts n-grams of the one order n only; a shorter or unknown context has no answer."""

    def _context_sizes(self) -> Sequence[int]:
        return (self.n - 1,)


def _counts(followers: Followers) -> dict[int, int]:
    """token -> how often, in the order first seen."""
    if isinstance(followers, int):
        return {followers: 1}
    return {token: -(-score // _ONCE) for token, score in followers.items() if token != _LEADER}
