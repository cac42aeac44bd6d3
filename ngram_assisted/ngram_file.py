"""N-gram storages as files: versioned, plain arrays in the safetensors format, never pickles.

What a file holds: for every context, oldest first, its length, its tokens, and its followers with their counts in the order first seen.
"""

import os
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ngram_assisted.ngram_storage import NGramStorage, OneLevelNGramStorage
from utils.errors import UserError

STORAGES: dict[str, type[NGramStorage]] = {"basic": NGramStorage, "onelevel": OneLevelNGramStorage}
FORMAT, VERSION = "n-gram storage", "1"
ARRAYS = ("sizes", "contexts", "branches", "followers", "counts")


def save_storage(storage: NGramStorage, path: Path, model: str = "") -> None:
    """Write a storage; `model` says whose token ids these are. Raises UserError where it cannot be written."""
    held = list(storage.contexts())
    columns: tuple[Any, ...] = (
        (len(context) for context, _ in held),
        chain.from_iterable(context for context, _ in held),
        (len(counts) for _, counts in held),
        chain.from_iterable(counts for _, counts in held),
        chain.from_iterable(counts.values() for _, counts in held),
    )
    arrays = {name: np.fromiter(column, dtype=np.int64) for name, column in zip(ARRAYS, columns, strict=True)}
    kind = next(name for name, kind in STORAGES.items() if type(storage) is kind)
    about = {"format": FORMAT, "version": VERSION, "kind": kind, "model": model}
    about |= {"order": str(storage.n), "vocabulary": str(storage.vocab_size)}
    half = path.parent / f"{path.name}.part"
    try:
        save_file(arrays, half, metadata=about)
        os.replace(half, path)  # an interruption leaves the old file, or none
    except (OSError, SafetensorError) as error:
        half.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be written: {reason}. Choose another place.") from error


def load_storage(path: Path, vocab_size: int, limit: int) -> tuple[NGramStorage, str, str]:
    """A storage from its file, the name of its kind, and whose token ids it holds. Raises UserError for a file that is not fit."""
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            _check(about, vocab_size)
            sizes, contexts, branches, followers, counts = (file.get_tensor(name).tolist() for name in ARRAYS)
        storage = STORAGES[about["kind"]](int(about["order"]), vocab_size, limit)
        words, tokens, times = iter(contexts), iter(followers), iter(counts)
        for size, branch in zip(sizes, branches, strict=True):
            found = zip(islice(tokens, branch), islice(times, branch), strict=True)
            storage.restore(tuple(islice(words, size)), dict(found))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:  # a UserError is a ValueError
        reason = str(error) if isinstance(error, UserError) else "it is damaged, or no file of /ngram_save"
        raise UserError(f"{path} is no n-gram storage for this session: {reason}.") from error
    return storage, about["kind"], about["model"]


def _check(about: dict[str, str], vocab_size: int) -> None:
    if about.get("format") != FORMAT:
        raise UserError("it is no file of /ngram_save")
    if about["version"] != VERSION:
        raise UserError(f"it has version {about['version']}, and this program reads version {VERSION}")
    if int(about["vocabulary"]) != vocab_size:
        raise UserError(f"it was made for {about['vocabulary']} token ids, and the target has {vocab_size}")
