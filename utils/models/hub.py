"""Before and after a download from the model hub: does the model exist, does it fit on the disk, did it arrive intact?

One request with a short timeout is sent to the hub, because its own client would retry for half a minute.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo, constants, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name

from utils.artifact_cache import digest
from utils.errors import UserError
from utils.models import Reporter
from utils.models.load_errors import explanation, is_offline, quiet
from utils.text import byte_size, count_of

TIMEOUT = 8.0  # seconds
# The files at the top of a repository that transformers downloads.
DOWNLOADED = re.compile(r"model(-\d+-of-\d+)?\.safetensors|[\w.-]+\.(json|model|txt|jinja)")


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


def cached_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model that was downloaded before."""
    path = None
    with suppress(ValueError):  # not a valid id
        path = try_to_load_from_cache(name, "config.json", revision=revision)
    # A file that is known not to exist is reported as a special object, not as None.
    return Path(path).parent if isinstance(path, str) else None


@contextmanager
def verified_download(name: str) -> Iterator[None]:
    """Compare the files that are downloaded in the block with the digests in their names.

    Deletes the files that differ, and raises UserError if there are any.
    """
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "blobs")
    # Files from earlier runs were compared when they arrived; hashing them again would delay every start.
    before = set(folder.glob("*"))
    try:
        yield
    finally:
        damaged = [blob for blob in sorted(set(folder.glob("*")) - before) if not _matches_its_name(blob)]
        for blob in damaged:
            blob.unlink(missing_ok=True)
        if damaged:
            raise UserError(
                f"'{name}' arrived damaged: {len(damaged)} of its files differ from those on the hub. Load it again."
            )


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


def _matches_its_name(blob: Path) -> bool:
    """Whether a file has the digest in its name: SHA-256 for large files, git's SHA-1 for small ones."""
    if re.fullmatch("[0-9a-f]{64}", blob.name):
        return digest(blob) == blob.name
    if re.fullmatch("[0-9a-f]{40}", blob.name):
        data = blob.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == blob.name
    return True
