"""N-gram storages as files: versioned, plain arrays in the safetensors format, never pickles.

A file holds for every context, oldest first: its length, its tokens, and its next tokens with their counts in the
order first seen.
"""

from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ngram_assisted.ngram_storage import NGramStorage, OneLevelNGramStorage
from utils.errors import UserError
from utils.files import replacing

STORAGES: dict[str, type[NGramStorage]] = {"basic": NGramStorage, "onelevel": OneLevelNGramStorage}
FORMAT, VERSION = "n-gram storage", "1"
DAMAGED = "it is damaged, or was not written by /ngram_save"
ARRAYS = ("sizes", "contexts", "branches", "followers", "counts")


def save_storage(storage: NGramStorage, path: Path, model: str = "") -> None:
    """Write a storage. model: the name of the model whose token ids these are. Raises UserError if the file cannot be
    written.
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
    about = {"format": FORMAT, "version": VERSION, "kind": kind, "model": model}
    about |= {"order": str(storage.n), "vocabulary": str(storage.vocab_size)}
    try:
        with replacing(path) as temporary:
            save_file(arrays, temporary, metadata=about)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be written: {reason}. Choose another place.") from error


def load_storage(path: Path, vocab_size: int, limit: int) -> tuple[NGramStorage, str, str]:
    """Read a storage. Returns it with the name of its kind and of the model whose token ids it holds.

    Raises UserError if the file cannot be read or does not fit this session.
    """
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            _check(about, vocab_size)  # first: other files have no such arrays
            sizes, contexts, branches, followers, counts = (file.get_tensor(name).tolist() for name in ARRAYS)
        storage = STORAGES[about["kind"]](int(about["order"]), vocab_size, limit)
        context_ids, next_ids, times = iter(contexts), iter(followers), iter(counts)
        for size, branch in zip(sizes, branches, strict=True):
            entries = zip(islice(next_ids, branch), islice(times, branch), strict=True)
            storage.restore(tuple(islice(context_ids, size)), dict(entries))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:  # a UserError is a ValueError
        reason = str(error) if isinstance(error, UserError) else DAMAGED
        raise UserError(f"{path} is not an n-gram storage for this session: {reason}.") from error
    return storage, about["kind"], about["model"]


def _check(about: dict[str, str], vocab_size: int) -> None:
    if about.get("format") != FORMAT:
        raise UserError("it was not written by /ngram_save")
    if about["version"] != VERSION:
        raise UserError(f"it has version {about['version']}, and this program reads version {VERSION}")
    if int(about["vocabulary"]) != vocab_size:
        raise UserError(f"it was made for {about['vocabulary']} token ids, and the target has {vocab_size}")
