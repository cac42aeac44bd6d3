"""Where a model comes from: a hub id (optionally ID@REVISION), a folder, a GGUF file or the word `embedded`.

Names are checked here before anything is loaded, because the messages are better than those of transformers: does a
model of the hub exist, does it fit on the disk? One request with a short timeout is sent to the
hub, because its own client would retry for half a minute.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from utils.errors import UserError
from utils.files import check_regular
from utils.models import Reporter
from utils.models.embedded import MODEL_NAME, embedded_folder
from utils.models.load_errors import explanation, is_offline, quiet
from utils.text import byte_size, count_of

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
CONVERSION = "safetensors.torch.save_file(torch.load('{}', weights_only=True), 'model.safetensors')"
WEIGHTS_AND_CONFIGS = ("model.safetensors", "model-*-of-*.safetensors", "*.json")
TIMEOUT = 8.0  # seconds
# The files at the top of a repository that transformers downloads.
DOWNLOADED = re.compile(r"model(-\d+-of-\d+)?\.safetensors|[\w.-]+\.(json|model|txt|jinja)")


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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file, and its number format there."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
            return tensor


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
    """Whether the checkpoint has a tokenizer, which is downloaded if necessary. A GGUF file always has one."""
    # Without the private flag a missing file raises instead of returning None.
    options = (source.hub_arguments or {}) | {"_raise_exceptions_for_missing_entries": False}
    return source.gguf is not None or any(cached_file(source.location, name, **options) for name in TOKENIZER_FILES)


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


def query_hub(name: str, revision: str | None, word: str, report: Reporter) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the keywords for `from_pretrained`, and the number of weights by format, if the hub knows it.

    `word` is how the user wrote the model id. Raises UserError if the model is not available or there is no room on
    the disk to download it.
    """
    chosen: dict[str, Any] = {"revision": revision} if revision else {}
    # The client would refuse the request. Loading then reads the cache or explains what is missing.
    if constants.HF_HUB_OFFLINE:
        return chosen, {}
    try:
        with quiet():
            # Without files_metadata the answer has no sizes.
            info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT, files_metadata=True)
    except Exception as error:
        if not (is_offline(error) and cached_folder(name, revision)):
            raise UserError(explanation(error, word)) from error
        report(f"the hub cannot be reached: using the copy of {word} that was downloaded before")
        return chosen | {"local_files_only": True}, {}
    _check_disk(info, name, word, report)
    return chosen, dict(info.safetensors.parameters) if info.safetensors else {}


def downloaded_folder(source: Source) -> Path:
    """Where the files of a checkpoint are. They are downloaded if necessary."""
    if source.hub_arguments is None:
        return Path(source.location)
    return Path(str(snapshot_download(source.location, allow_patterns=[*WEIGHTS_AND_CONFIGS], **source.hub_arguments)))


def checkpoint_folder(source: Source) -> Path | None:
    """The folder with the files of a checkpoint, or None if it was not downloaded before."""
    if source.hub_arguments is None:
        return Path(source.location)
    return cached_folder(source.location, source.hub_arguments.get("revision"))


def cached_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model that was downloaded before."""
    path = None
    with suppress(ValueError):  # not a valid id
        path = try_to_load_from_cache(name, "config.json", revision=revision)
    # A file that is known not to exist is reported as a special object, not as None.
    return Path(path).parent if isinstance(path, str) else None


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files that transformers would read: one file comes before an index. Those of an index may be missing.

    Raises UserError for an index that names files outside of its folder.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        yield folder / "model.safetensors"
    elif index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        # By name only, because the hub's cache links to files outside of the folder.
        if outside := next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), ""):
            raise UserError(f"{index} names a file outside of its folder ({outside[:80]!r}): fetch or copy it again.")
        yield from (folder / name for name in names)


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file, of which only the header is read."""
    check_regular(path)
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # the file can only be iterated through keys()
            part = file.get_slice(name)
            yield StoredTensor(path, name, part.get_dtype(), tuple(part.get_shape()))


def _check_disk(info: ModelInfo, name: str, word: str, report: Reporter) -> None:
    """Report the size of the download. Raises UserError if the disk has no room for it."""
    files = [file for file in info.siblings or () if DOWNLOADED.fullmatch(file.rfilename)]
    missing = [
        file for file in files if not isinstance(try_to_load_from_cache(name, file.rfilename, revision=info.sha), str)
    ]
    size = sum(file.size or 0 for file in missing)
    # Only missing weights are worth a message and a check of the disk.
    if not any(file.rfilename.endswith(".safetensors") for file in missing):
        return
    cache = Path(constants.HF_HUB_CACHE)
    # The cache folder may not exist before the first download.
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if free < size:
        raise UserError(
            f"'{word}' needs {byte_size(size)} on the disk of {cache}, which has {byte_size(free)} free: make room, "
            "or set HF_HOME to a folder on a different disk."
        )
    report(f"downloading {word}, {byte_size(size)} in {count_of(len(missing), 'file')}, to {cache} ...")
