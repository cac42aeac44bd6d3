"""N-gram storages as files: versioned, plain arrays in the safetensors format, never pickles.

A file holds for every context, oldest first: its length, its tokens, and its next tokens with their counts in the
order first seen.
"""

from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ngram_assisted.ngram_storage import NGramStorage, OneLevelNGramStorage
from utils.errors import UserError
from utils.files import check_regular, os_reason, write_file
from utils.text import encodable

STORAGES: dict[str, type[NGramStorage]] = {"basic": NGramStorage, "onelevel": OneLevelNGramStorage}
FORMAT, VERSION = "n-gram storage", "1"
DAMAGED = "it is damaged, or was not written by /ngram save"
ARRAYS = ("sizes", "contexts", "branches", "followers", "counts")
MAX_COUNT = 1 << 40  # more occurrences than any text has


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
        _check_arrays(arrays, storage)
        _restore(storage, arrays)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {os_reason(error)}.") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:  # a UserError is a ValueError
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


def _check_arrays(arrays: dict[str, NDArray[Any]], storage: NGramStorage) -> None:
    """Raise UserError unless the arrays hold whole entries and nothing else. Tokens are checked as they are entered."""
    sizes, contexts, branches, followers, counts = (arrays[name] for name in ARRAYS)
    numbers = all(array.dtype == np.int64 and array.ndim == 1 for array in arrays.values())
    # The bounds come before the sums, which could overflow.
    whole = (
        numbers
        and _within(sizes, storage.n - 1)
        and _within(branches, storage.vocab_size)
        and _within(counts, MAX_COUNT)
        and len(sizes) == len(branches)
        and int(sizes.sum()) == len(contexts)
        and int(branches.sum()) == len(followers) == len(counts)
    )
    if not whole:
        raise UserError(DAMAGED)


def _within(array: NDArray[Any], high: int) -> bool:
    """Whether all numbers are from 1 to `high`."""
    return not len(array) or bool(array.min() >= 1 and array.max() <= high)


def _restore(storage: NGramStorage, arrays: dict[str, NDArray[Any]]) -> None:
    context_ids, next_ids, times = (iter(arrays[name].tolist()) for name in ("contexts", "followers", "counts"))
    for size, branch in zip(arrays["sizes"].tolist(), arrays["branches"].tolist(), strict=True):
        entries = dict(zip(islice(next_ids, branch), islice(times, branch), strict=True))
        if len(entries) < branch:  # a token twice
            raise UserError(DAMAGED)
        storage.restore(tuple(islice(context_ids, size)), entries)
