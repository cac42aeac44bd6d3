"""Explain in one sentence why a model did not load, and silence the libraries while it loads.

A table maps exceptions of transformers and the hub client to a cause and a remedy. An error that is not in the table
keeps the first line of its own message.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO

from huggingface_hub.utils.tqdm import enable_progress_bars as show_hub_progress_bars
from transformers.utils.logging import disable_progress_bar as hide_progress_bars
from transformers.utils.logging import enable_progress_bar as show_progress_bars
from transformers.utils.logging import is_progress_bar_enabled as are_progress_bars_shown

from utils.errors import UserError

TIMEOUTS = ("ConnectTimeout", "NetworkError", "PoolTimeout", "ProxyError", "ReadTimeout")
OFFLINE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError", *TIMEOUTS)
MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory", "not enough memory")
# What has happened, and its signs in the text of an exception or in the names of its classes: the hub client moves its
# classes, and importing them all would be slow. The first row that applies is used, so the specific ones come first.
CAUSES = {
    "is gated: accept its licence on its model page, then log in with `hf auth login`": ("GatedRepoError",),
    "is not accessible because the hub rejects your token: log in again with `hf auth login`": ("Invalid credentials",),
    "is neither a folder, nor a .gguf file, nor a public model id on the hub: check the spelling": (
        "RepositoryNotFoundError",
        "HFValidationError",
    ),
    "is not on this machine and the hub cannot be reached: connect once, or name a local folder": OFFLINE,
    "needs Python code from its own repository, which is never run: use a model that transformers knows": (
        "custom code",
    ),
    "has no safetensors weights, and pickled ones are never loaded: download it and convert the file with "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')": (
        "named model.safetensors",
    ),
    "has weights of other shapes than transformers derives from its config.json or GGUF header: check it, or use "
    "another copy of the model": ("ignore_mismatched_sizes",),
    "does not fit into memory: use a smaller model, --quantize int8, or a different --device": MEMORY,
}


@contextmanager
def explained_errors(name: str) -> Iterator[None]:
    """Turn any exception in the block into a UserError about the model `name`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(explanation(error, name)) from error


def explanation(error: BaseException, name: str) -> str:
    """Return one sentence about a failed load."""
    # Libraries wrap the original error, so the whole chain of causes counts for classes.
    for sentence, signs in CAUSES.items():
        if _has_sign(signs, f"{_classes(error)} {error}"):
            return f"'{name}' {sentence}."
    # The GGUF reader raises whatever the damaged bytes lead to, so no class or phrase is typical.
    if name.endswith(".gguf"):
        return f"'{name}' is not a complete GGUF file ({first_line(error)}): fetch or copy it again."
    return f"'{name}' could not be loaded ({first_line(error)}): check its config.json, or fetch or copy it again."


def first_line(error: BaseException) -> str:
    """Return the first line of a message without its full stop, or the first two if the first one ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    # PyTorch puts the reason on the line after the colon.
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    return text[:300].rstrip(".") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of any library means that a machine's or a GPU's memory was exhausted."""
    return _has_sign(MEMORY, f"{type(error).__name__} {error}")


def is_offline(error: BaseException) -> bool:
    """Whether the hub could not be reached, or may not be used."""
    return _has_sign(OFFLINE, _classes(error))


def _has_sign(signs: Sequence[str], text: str) -> bool:
    return any(sign in text for sign in signs)


def _classes(error: BaseException | None) -> str:
    """The names of the classes of an exception and of those that led to it."""
    names = []
    while error is not None:
        names.append(type(error).__name__)
        error = error.__cause__ or error.__context__
    return " ".join(names)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of libraries. Progress bars of downloads and conversions appear only on a terminal."""
    # logging has no public way to read the level that logging.disable has set.
    level, bars, terminal = logging.root.manager.disable, are_progress_bars_shown(), sys.stderr.isatty()
    logging.disable(logging.WARNING)
    hide_progress_bars()  # hides those of the hub as well
    if bars and terminal:
        show_hub_progress_bars()
    try:
        # Some bars of downloads and of GGUF conversions cannot be switched off, so stderr is redirected.
        with warnings.catch_warnings(), nullcontext() if terminal else redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if bars:
            show_progress_bars()
