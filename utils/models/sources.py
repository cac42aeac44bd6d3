"""Where a model comes from: a hub id, with @REVISION or without, a folder, a GGUF file or the word `embedded`; checked before it is loaded.

Nothing is loaded here. What is known before transformers is asked gets a better sentence than what it would say.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from utils.errors import UserError
from utils.models.embedded import MODEL_NAME, Report, embedded_folder
from utils.models.hub import ask_hub

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint as `from_pretrained` wants it: a folder or a hub id, the GGUF file in it, and what the hub is to be told about an id.

    counts: how many weights of each format the hub says there are.
    """

    place: str
    name: str
    gguf: str | None = None
    hub: dict[str, Any] | None = None
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords that every `from_pretrained` of this checkpoint takes; remote code is never run."""
        return {"trust_remote_code": False} | ({"gguf_file": self.gguf} if self.gguf else {}) | (self.hub or {})


def locate(word: str, report: Report) -> Source:
    """The checkpoint that a word of the command line means.

    Raises UserError for a path that does not exist or that holds no checkpoint that may be loaded.
    """
    if word == "embedded":
        return Source(str(embedded_folder(report)), MODEL_NAME)
    # An empty word would be the current folder.
    path = path_of(word.strip() or "no model")
    if path.is_dir():
        _check_folder(path)
        return Source(str(path), path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(
                f"'{word}' is a file but no .gguf file: give a GGUF file, or the folder that holds config.json."
            )
        return Source(str(path.parent), path.name, path.name)
    # What looks like a path is never sent to the hub: it would answer with a riddle, or not at all for half a minute.
    if word.startswith((".", "/", "~")) or word.lower().endswith(".gguf") or word.count("/") > 1 or not word.strip():
        raise UserError(
            f"'{word}' does not exist: give a folder, a .gguf file, a hub id such as Qwen/Qwen3-0.6B or ID@REVISION, or embedded."
        )
    name, _, revision = word.partition("@")
    found = ask_hub(name, revision or None, word, report)
    return Source(name, word, hub=found.arguments, counts=found.counts)


def path_of(word: str) -> Path:
    """A word as a path. Raises UserError for one that can be none."""
    try:
        path = Path(word).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (OSError, RuntimeError, ValueError) as error:  # another user's home, a name too long, a zero byte
        raise UserError(
            f"'{word[:80]}' cannot be a path ({getattr(error, 'strerror', None) or error}): check the spelling."
        ) from error
    return path


def has_tokenizer(source: Source) -> bool:
    """Whether the checkpoint brings a tokenizer of its own; a GGUF file always does."""
    return source.gguf is not None or any(
        cached_file(source.place, name, _raise_exceptions_for_missing_entries=False, **source.hub or {})
        for name in TOKENIZER_FILES
    )


def _check_folder(path: Path) -> None:
    # Several quantizations of one model may lie side by side: the user chooses.
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").exists():
            raise UserError(
                f"The folder '{path}' holds an adapter: merge it into its base model, and give the folder of that."
            )
        remedy = (
            f"give the file itself, {ggufs[0]}" if ggufs else "give the folder that holds config.json and the weights"
        )
        raise UserError(f"The folder '{path}' holds no config.json: {remedy}.")
    if odd := next((file for file in path.glob("*.safetensors") if not file.is_file()), None):
        raise UserError(f"'{odd}' is no file: copy the weights again.")
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth"))
        found = "only pickled weights, which are never loaded because they can run code" if pickled else "no weights"
        raise UserError(f"The folder '{path}' holds {found}: give a folder with .safetensors files.")
