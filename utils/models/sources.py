"""Where a model comes from: a hub id (optionally ID@REVISION), a folder, a GGUF file or the word `embedded`.

Names are checked here before anything is loaded, because the messages are better than those of transformers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from utils.errors import UserError
from utils.models import Reporter
from utils.models.embedded import MODEL_NAME, embedded_folder
from utils.models.hub import query_hub

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
CONVERSION = "safetensors.torch.save_file(torch.load('{}', weights_only=True), 'model.safetensors')"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint as `from_pretrained` takes it.

    `location` is a folder or a hub id, `name` is for messages, and `gguf` is the name of a GGUF file in the folder.
    `hub_arguments` are keywords for a hub id, None for a folder. `weight_counts` are weights by format, if the hub
    knows them.
    """

    location: str
    name: str
    gguf: str | None = None
    hub_arguments: dict[str, Any] | None = None
    weight_counts: dict[str, int] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords for every `from_pretrained` of this checkpoint. Remote code is never run."""
        gguf = {"gguf_file": self.gguf} if self.gguf else {}
        return {"trust_remote_code": False} | gguf | (self.hub_arguments or {})


def locate(word: str, report: Reporter) -> Source:
    """Find the checkpoint that a word of the command line names.

    Raises UserError for a path that does not exist or a folder without a checkpoint that may be loaded.
    """
    if word == "embedded":
        return Source(str(embedded_folder(report)), MODEL_NAME)
    # An empty word would mean the current folder.
    path = parse_path(word.strip() or "no model")
    if path.is_dir():
        _check_folder(path)
        return Source(str(path), path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"'{word}' is not a .gguf file: name a GGUF file, or the folder that holds config.json.")
        return Source(str(path.parent), path.name, path.name)
    # Anything that looks like a path is not sent to the hub, which would answer late or with a misleading message.
    if word.startswith((".", "/", "~")) or word.lower().endswith(".gguf") or word.count("/") > 1 or not word.strip():
        raise UserError(
            f"'{word}' does not exist: name a folder, a .gguf file, a hub id such as Qwen/Qwen3-0.6B or ID@REVISION, "
            "or embedded."
        )
    name, _, revision = word.partition("@")
    arguments, counts = query_hub(name, revision or None, word, report)
    return Source(name, word, hub_arguments=arguments, weight_counts=counts)


def parse_path(word: str) -> Path:
    """Return a word as a path, which need not exist. Raises UserError if it cannot be a path."""
    try:
        path = Path(word).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user's home, a name too long, a zero byte
        raise UserError(
            f"'{word[:80]}' cannot be a path ({getattr(error, 'strerror', None) or error}): check the spelling."
        ) from error
    return path


def has_tokenizer(source: Source) -> bool:
    """Whether the checkpoint has a tokenizer. A GGUF file always has one."""
    return source.gguf is not None or any(found_file(source, name) for name in TOKENIZER_FILES)


def found_file(source: Source, name: str) -> str | None:
    """The path of a file of the checkpoint, downloaded if necessary, or None if there is no such file."""
    # Without this private flag a missing file raises instead of returning None.
    path: str | None = cached_file(
        source.location, name, _raise_exceptions_for_missing_entries=False, **source.hub_arguments or {}
    )
    return path


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").exists():
            raise UserError(f"The folder '{path}' holds an adapter: merge it into its base model and name the result.")
        # A folder may hold several quantizations of one model, so the user must choose.
        gguf = next(iter(sorted(path.glob("*.gguf"))), None)
        remedy = f"name the file itself, {gguf}" if gguf else "name the folder that holds config.json and the weights"
        raise UserError(f"The folder '{path}' holds no config.json: {remedy}.")
    if odd := next((file for file in path.glob("*.safetensors") if not file.is_file()), None):
        raise UserError(f"'{odd}' is not a regular file: copy the weights again.")
    if not any(path.glob("*.safetensors")):
        pickled = next((file.name for end in ("bin", "pt", "pth") for file in sorted(path.glob(f"*.{end}"))), None)
        if pickled:
            raise UserError(
                f"The folder '{path}' holds only pickled weights, which are never loaded because they can run code: "
                f"convert them in Python with {CONVERSION.format(pickled)}."
            )
        raise UserError(f"The folder '{path}' holds no weights: name a folder with .safetensors files.")
