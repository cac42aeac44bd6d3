"""What lies between a hub id and its files: asking about a model before it is fetched, once and with a short wait (the hub's client would
retry for half a minute), room on the disk, and whether what arrived is what was sent.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name

from utils.errors import UserError
from utils.models.artifact_cache import digest
from utils.models.embedded import Report
from utils.models.load_errors import explanation, is_offline, quiet
from utils.units import in_units

PATIENCE = 8.0  # seconds
WANTED = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|[\w.-]+\.(json|model|txt|jinja)"
)  # of the files at the top of a repository


@dataclass(frozen=True, slots=True)
class Found:
    """arguments: what `from_pretrained` has to be told. counts: weights by their format."""

    arguments: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def ask_hub(name: str, revision: str | None, word: str, report: Report) -> Found:
    """What a hub id stands for. Raises UserError where it names nothing that can be had, or there is no room to keep it."""
    chosen = {"revision": revision} if revision else {}
    if constants.HF_HUB_OFFLINE:  # the user's own wish: nothing is asked
        return Found(chosen)
    try:
        with quiet():
            told = HfApi().model_info(name, revision=revision, timeout=PATIENCE, files_metadata=True)
    except Exception as error:
        if not (is_offline(error) and kept_folder(name, revision)):
            raise UserError(explanation(error, word)) from error
        report(f"the hub cannot be reached: {word} is taken as it was fetched before")
        return Found(chosen | {"local_files_only": True})
    _announce(told, name, word, report)
    return Found(chosen, dict(told.safetensors.parameters) if told.safetensors else {})


def kept_folder(name: str, revision: str | None) -> Path | None:
    """Where a model lies that was fetched before."""
    path = None
    with suppress(ValueError):  # no id at all
        path = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(path).parent if isinstance(path, str) else None


@contextmanager
def sound(name: str) -> Iterator[None]:
    """What is fetched inside is compared with the digests that the hub names it by. Raises UserError, and drops it, where it differs."""
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "blobs")
    before = set(folder.glob("*"))
    try:
        yield
    finally:
        damaged = [blob for blob in sorted(set(folder.glob("*")) - before) if not _is_sound(blob)]
        for blob in damaged:
            blob.unlink(missing_ok=True)
        if damaged:
            raise UserError(
                f"'{name}' arrived damaged ({len(damaged)} of its files differ from the hub's): load it again."
            )


def _announce(told: Any, name: str, word: str, report: Report) -> None:
    """Say what will be fetched, if there is room for it."""
    files = [file for file in told.siblings or () if WANTED.fullmatch(file.rfilename)]
    lacking = [
        file for file in files if not isinstance(try_to_load_from_cache(name, file.rfilename, revision=told.sha), str)
    ]
    size = sum(file.size or 0 for file in lacking)
    if not any(file.rfilename.endswith(".safetensors") for file in lacking):
        return
    place = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.exists())).free
    if free < size:
        raise UserError(
            f"'{word}' takes {in_units(size)} and the disk of {place} has {in_units(free)} left: make room, or set HF_HOME."
        )
    report(f"fetching {word}, {in_units(size)} in {len(lacking)} files, to {place} ...")


def _is_sound(blob: Path) -> bool:
    """Large files are named by their SHA-256, small ones as git does; what is named otherwise tells nothing."""
    if re.fullmatch("[0-9a-f]{64}", blob.name):
        return digest(blob) == blob.name
    if re.fullmatch("[0-9a-f]{40}", blob.name):
        data = blob.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == blob.name
    return True
