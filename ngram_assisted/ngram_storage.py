"""N-gram storages: the token that followed a context most often, over plain ints, in constant time and bounded memory.

A k-gram is a context of k-1 tokens and the token after it. The storages know neither models nor text. What is
entered, and when, is decided by text_drafters.

A file is versioned and holds plain arrays in the safetensors format, never pickles: for every context, oldest first,
its length, its tokens, and its next tokens with their counts in the order first seen.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from utils.bounds import MAX_NGRAMS, NGRAM_LIMIT, NGRAM_ORDER, WholeRange
from utils.errors import UserError
from utils.files import check_regular, os_reason, write_file
from utils.text import encodable

Context = tuple[int, ...]
Scores = dict[int, int]  # token -> its score; _LEADER -> the token with the highest score
Followers = int | Scores  # an int: this token, seen once. Most long contexts have only one next token.

_LEADER = -1
_ONCE = 1 << 40  # one occurrence; smaller amounts break ties in favour of the token seen first
FORMAT, VERSION = "n-gram storage", "1"
DAMAGED = "it is damaged, or was not written by /ngram save"
ARRAYS = ("sizes", "contexts", "branches", "followers", "counts")


class NGramStorage:
    """Counts k-grams for every k in 2..n and looks up the longest known context, down to a single token.

    n: the largest order, 2..16. vocab_size: ids run from 0 to vocab_size - 1. limit: maximum number of k-grams;
    beyond it the contexts that were entered first are forgotten. Raises UserError if any of them is out of range.
    """

    def __init__(self, n: int, vocab_size: int, limit: int = MAX_NGRAMS) -> None:
        NGRAM_ORDER.check(n, "n-gram order")
        WholeRange(1).check(vocab_size, "vocabulary size")
        self.n, self.vocab_size = n, vocab_size
        self._levels: dict[int, dict[Context, Followers]] = {size: {} for size in self._context_sizes()}
        self._ages: deque[Context] = deque()  # every context once, oldest first
        self._grams = 0
        self._limit = limit
        self.limit = limit

    def __len__(self) -> int:
        """The number of k-grams."""
        return self._grams

    @property
    def limit(self) -> int:
        """Maximum number of k-grams."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        NGRAM_LIMIT.check(limit, "n-gram limit")
        self._limit = limit
        self._forget()

    def initialize(self, ids: Sequence[int]) -> None:
        """Enter every k-gram of a token sequence. What was stored before stays.

        Raises UserError for a token outside the vocabulary; then nothing is entered.
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
        """Count each of `next_tokens` once as a next token of the context `ids` (its last n-1 ids matter).

        Raises UserError for a token outside the vocabulary; then nothing is entered.
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
        """The most frequent next token of the longest known context, and that context's length. Ties go to the one
        seen first.

        None if no context is known.
        """
        known = len(ids)
        for size, level in self._levels.items():  # longest context first
            if size <= known:
                followers = level.get(tuple(ids[known - size :]))
                if followers is not None:
                    return (followers if isinstance(followers, int) else followers[_LEADER]), size
        return None

    def next_token(self, ids: Sequence[int]) -> int | None:
        """The most frequent next token of the longest known context, or None."""
        match = self.look_up(ids)
        return None if match is None else match[0]

    def has_gram(self, gram: Sequence[int]) -> bool:
        """Whether this k-gram (context, then token) is stored."""
        followers = self._levels.get(len(gram) - 1, {}).get(tuple(gram[:-1]))
        return followers is not None and gram[-1] in _counts(followers)

    def reset(self) -> None:
        """Forget everything."""
        for level in self._levels.values():
            level.clear()
        self._ages.clear()
        self._grams = 0

    def contexts(self) -> Iterator[tuple[Context, dict[int, int]]]:
        """Every context, oldest first, with the counts of its next tokens in the order first seen."""
        for context in self._ages:
            yield context, _counts(self._levels[len(context)][context])

    def restore(self, context: Context, counts: dict[int, int]) -> None:
        """Enter a new context as `contexts` yields it. Raises UserError if it does not fit this storage."""
        level = self._levels.get(len(context))
        self._check([*context, *counts])
        if level is None or context in level or not counts or min(counts.values()) < 1:
            raise UserError(DAMAGED)
        level[context] = _followers(counts)
        self._ages.append(context)
        self._grams += len(counts)
        self._forget()

    def _context_sizes(self) -> Sequence[int]:
        """Context lengths that are stored, longest first."""
        return range(self.n - 1, 0, -1)

    def _check(self, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            outside = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise UserError(f"Token id {outside} is outside the vocabulary, 0 to {self.vocab_size - 1}.")

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
        if score is None:  # later tokens rank lower among equals
            # _LEADER is an entry too, so the rank from 0 is len - 1.
            followers[token] = _ONCE - len(followers) + 1
            self._grams += 1
            return
        followers[token] = score = score + _ONCE
        if score > followers[followers[_LEADER]]:
            followers[_LEADER] = token

    def _forget(self) -> None:
        """Remove the oldest contexts until the limit is met."""
        while self._grams > self._limit:
            context = self._ages.popleft()
            self._grams -= len(_counts(self._levels[len(context)].pop(context)))


class OneLevelNGramStorage(NGramStorage):
    """Counts n-grams of order n only. A shorter or unknown context has no next token."""

    def _context_sizes(self) -> Sequence[int]:
        return (self.n - 1,)


STORAGES: dict[str, type[NGramStorage]] = {"basic": NGramStorage, "onelevel": OneLevelNGramStorage}


def _followers(counts: dict[int, int]) -> Followers:
    """The inverse of `_counts`: the same scores as `_add` leaves, so that ties are broken as before."""
    if len(counts) == 1 and (first := next(iter(counts.items())))[1] == 1:
        return first[0]  # a dict would take three times the memory
    scores = {token: count * _ONCE - rank for rank, (token, count) in enumerate(counts.items())}
    scores[_LEADER] = max(scores, key=scores.__getitem__)
    return scores


def _counts(followers: Followers) -> dict[int, int]:
    """token -> its count, in the order first seen."""
    if isinstance(followers, int):
        return {followers: 1}
    # Rounded up: a score is count x _ONCE less the token's rank.
    return {token: -(-score // _ONCE) for token, score in followers.items() if token != _LEADER}


def save_storage(storage: NGramStorage, path: Path, model: str = "", *, overwrite: bool = False) -> None:
    """Write a storage, whole or not at all. model: the name of the model whose token ids these are.

    Raises UserError if the file cannot be written, or exists and `overwrite` is False.
    """
    held = list(storage.contexts())
    # Ragged lists as flat arrays, in the order of ARRAYS: lengths, contexts, lengths, tokens, counts.
    columns: tuple[Any, ...] = (
        (len(context) for context, _ in held),
        chain.from_iterable(context for context, _ in held),
        (len(counts) for _, counts in held),
        chain.from_iterable(counts for _, counts in held),
        chain.from_iterable(counts.values() for _, counts in held),
    )
    arrays = {name: np.fromiter(column, dtype=np.int64) for name, column in zip(ARRAYS, columns, strict=True)}
    kind = next(name for name, kind in STORAGES.items() if type(storage) is kind)
    about = {"format": FORMAT, "version": VERSION, "kind": kind, "model": encodable(model)}
    about |= {"order": str(storage.n), "vocabulary": str(storage.vocab_size)}
    write_file(path, save(arrays, metadata=about), overwrite=overwrite)


def load_storage(path: Path, vocab_size: int, limit: int) -> tuple[NGramStorage, str, str]:
    """Read a storage. Returns it with the name of its kind and of the model whose token ids it holds.

    Raises UserError if the file cannot be read or does not fit this session.
    """
    try:
        check_regular(path)
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            _check(about, vocab_size)  # first: other files have no such arrays
            arrays = {name: file.get_tensor(name) for name in ARRAYS}
        storage = STORAGES[about["kind"]](int(about["order"]), vocab_size, limit)
        _restore(storage, arrays)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {os_reason(error)}.") from error
    except Exception as error:  # whatever damaged files lead to
        reason = str(error).rstrip(".") if isinstance(error, UserError) else DAMAGED
        raise UserError(f"{path} is not an n-gram storage for this session: {reason}.") from error
    return storage, about["kind"], about["model"]


def _check(about: dict[str, str], vocab_size: int) -> None:
    if about.get("format") != FORMAT:
        raise UserError("it was not written by /ngram save")
    if about["version"] != VERSION:
        raise UserError(f"it has version {about['version']}, and this program reads version {VERSION}")
    if int(about["vocabulary"]) != vocab_size:
        raise UserError(f"it was made for {about['vocabulary']} token ids, and the target has {vocab_size}")


def _restore(storage: NGramStorage, arrays: dict[str, NDArray[Any]]) -> None:
    """Enter what the arrays hold. Raises an error unless these are whole entries and nothing else."""
    if any(array.dtype != np.int64 or array.ndim != 1 for array in arrays.values()):
        raise UserError(DAMAGED)
    known: dict[int, int] = {}  # one object for each token id, as in a text that is entered
    context_ids, next_ids = (
        map(known.setdefault, ids, ids) for ids in (arrays[name].tolist() for name in ("contexts", "followers"))
    )
    times = iter(arrays["counts"].tolist())
    for size, branch in zip(arrays["sizes"].tolist(), arrays["branches"].tolist(), strict=True):
        context = tuple(islice(context_ids, size))
        entries = dict(zip(islice(next_ids, branch), islice(times, branch), strict=True))
        if len(context) < size or len(entries) < branch:  # fewer than declared, or a token twice
            raise UserError(DAMAGED)
        storage.restore(context, entries)
    if [*context_ids, *next_ids, *times]:
        raise UserError(DAMAGED)
