"""Cached folders that are either complete or absent.

A manifest with the digest of every file is written last, then the folder is renamed into place. So nothing that an
interruption, a full disk or a damaged sector leaves behind is taken for a model. Nothing heavy is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"
STALE_SECONDS = 3600


@contextmanager
def build_folder(folder: Path, made_from: str) -> Iterator[Path]:
    """Yield the path of a folder to create and fill. It becomes `folder` if the block ends without an error.

    Temporary files may be written next to it. `made_from` describes the origin, which `is_intact` compares.
    """
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.new-", dir=root, ignore_cleanup_errors=True) as work:
        made = Path(work) / "made"
        yield made
        made.chmod(0o700)
        files = {path.name: digest(path) for path in sorted(made.iterdir())}
        (made / MANIFEST).write_text(json.dumps({"made_from": made_from, "files": files}, indent=1))
        _move_into_place(made, folder, made_from)


def is_intact(folder: Path, made_from: str) -> bool:
    """Whether a folder has this origin and unchanged files. Hashing takes about a second per gigabyte."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        # An empty list would otherwise pass as a folder in which no file has changed.
        if not files or manifest["made_from"] != made_from:
            return False
        return all(digest(folder / name) == sha for name, sha in files.items())
    # The manifest itself may be damaged: not JSON, or JSON of a different shape.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_stale(folder: Path) -> None:
    """Remove the working folders of killed runs. A recent one may belong to a run that is still active."""
    for path in folder.parent.glob(f"{folder.name}.new-*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _move_into_place(made: Path, folder: Path, made_from: str) -> None:
    """Rename `made` to `folder`, unless another process has put an intact folder there in the meantime."""
    try:
        os.replace(made, folder)
    except OSError:
        if is_intact(folder, made_from):
            return
        # A folder can only replace an empty one, so the damaged one is moved to the working folder and removed with it.
        os.replace(folder, made.with_name("damaged"))
        os.replace(made, folder)
