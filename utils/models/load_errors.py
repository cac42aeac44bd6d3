"""Why a model did not load, in one sentence, and silence while it tries.

transformers and the hub client say it in tracebacks of several causes; a table maps them to a cause and a remedy. What is not in the
table keeps the first line of its own message.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO

import huggingface_hub.utils as hub
from transformers.utils.logging import disable_progress_bar as hide_progress_bars
from transformers.utils.logging import enable_progress_bar as show_progress_bars
from transformers.utils.logging import is_progress_bar_enabled as are_progress_bars_shown

from utils.errors import UserError


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of the table: exception class names, or words of a message, and what they mean."""

    classes: tuple[str, ...]
    words: tuple[str, ...]
    sentence: str


OUT_OF_MEMORY_CLASSES = ("OutOfMemoryError", "MemoryError")
OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")

OFFLINE_CLASSES = (
    *(
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "ConnectError",
        "ConnectTimeout",
        "ReadTimeout",
        "PoolTimeout",
    ),
    *("ConnectionError", "ProxyError", "NetworkError"),
)

# The first row that matches wins, so the narrow ones come first.
CAUSES = (
    Cause(("GatedRepoError",), (), "is gated: accept its licence on its model page, then log in with `hf auth login`"),
    Cause(
        ("RevisionNotFoundError",), (), "has no such revision: leave @REVISION out, or name a branch, a tag or a commit"
    ),
    Cause(
        (),
        ("Invalid credentials",),
        "cannot be asked for, since the hub refuses your token: log in again with `hf auth login`",
    ),
    Cause(
        ("RepositoryNotFoundError", "HFValidationError"),
        (),
        "is neither a folder, nor a .gguf file, nor a public model id on the hub: check the spelling",
    ),
    Cause(
        OFFLINE_CLASSES,
        (),
        "is not on this machine and the hub cannot be reached: connect once, or give a local folder",
    ),
    Cause(
        (),
        ("custom code",),
        "needs Python code from its own repository, which is never run: give a model that transformers knows",
    ),
    Cause(
        (),
        ("does not recognize this architecture", "Unrecognized model"),
        "is of a kind that the installed transformers does not know",
    ),
    Cause((), ("Unrecognized configuration class",), "is not a text generation model"),
    Cause(("SafetensorError",), (), "has truncated or corrupt weights: fetch or copy them again"),
    Cause(
        (),
        ("named model.safetensors",),
        "has no safetensors weights, and pickled ones are never loaded: convert it to safetensors",
    ),
    Cause(
        (), ("ignore_mismatched_sizes",), "has weights whose shapes differ from its config.json: fetch or copy it again"
    ),
    Cause(
        ("ModuleNotFoundError",),
        ("pip install", "No module named"),
        "needs a package that is not installed, for its quantization most likely: take the unquantized model, or a GGUF file",
    ),
    Cause(
        (),
        ("weight_map", "is not in the index", ".index.json"),
        "has an index of its weights that cannot be used: fetch or copy it again",
    ),
    Cause(
        (),
        (".safetensors'", '.safetensors"'),
        "lacks a file of its weights, or has one that cannot be read: fetch or copy it again",
    ),
    Cause(("JSONDecodeError",), (), "holds a file that is not valid JSON: fetch or copy it again"),
    Cause((), ("backend tokenizer",), "has no usable tokenizer files: copy them next to the weights"),
    Cause(
        (),
        ("No space left on device",),
        "could not be kept, since the disk is full: make room, or set HF_HOME to another disk",
    ),
    Cause(
        OUT_OF_MEMORY_CLASSES,
        OUT_OF_MEMORY_WORDS,
        "does not fit into memory: take a smaller model, --quantize int8, or another --device",
    ),
)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into a UserError about the model `name`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(explanation(error, name)) from error


def explanation(error: BaseException, name: str) -> str:
    """One sentence for a failed load."""
    text = str(error)
    # By name: the hub client moves its classes about, and importing them all would be slow.
    classes = {type(cause).__name__ for cause in _causes(error)}
    for cause in CAUSES:
        if classes & set(cause.classes) or any(words in text for words in cause.words):
            return f"'{name}' {cause.sentence}."
    if name.endswith(".gguf"):
        return f"'{name}' is no whole GGUF file ({first_line(error)}): fetch or copy it again."
    return f"'{name}' could not be loaded ({first_line(error)}): look at its config.json, or fetch or copy it again."


def first_line(error: BaseException) -> str:
    """What an error says, without the advice for programmers that follows; two lines where the first only announces the second."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    return said[:300].rstrip(".") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is some library's way to say that memory, the machine's or a GPU's, did not suffice."""
    return type(error).__name__ in OUT_OF_MEMORY_CLASSES or any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def is_offline(error: BaseException) -> bool:
    """Whether the hub could not be reached, or may not be asked."""
    return any(type(cause).__name__ in OFFLINE_CLASSES for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of the libraries, and no bars but those of slow steps, where somebody can see them."""
    level, bars, watched = logging.root.manager.disable, are_progress_bars_shown(), sys.stderr.isatty()
    logging.disable(logging.WARNING)
    hide_progress_bars()  # and with them those of the hub
    if bars and watched:
        hub.enable_progress_bars()
    try:
        # Some bars obey no switch: those of a download and of a GGUF conversion.
        with warnings.catch_warnings(), nullcontext() if watched else redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if bars:
            show_progress_bars()
