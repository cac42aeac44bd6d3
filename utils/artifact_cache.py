"""Cached folders that are either complete or absent.

A manifest with the names of all files is written last, then the folder is renamed into place. So nothing that an
interruption or a full disk leaves behind is mistaken for a model. Nothing heavy is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "manifest.json"
STALE_SECONDS = 86_400  # no folder takes so long to build


@contextmanager
def build_folder(folder: Path, made_from: str) -> Iterator[Path]:
    """Yield the path of a folder to create and fill. It becomes `folder` if the block ends without an error.

    Temporary files may be written next to it. `made_from` describes the origin, which `is_intact` compares.
    """
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    remove_stale(root)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.new-", dir=root, ignore_cleanup_errors=True) as work:
        made = Path(work, "made")
        yield made
        made.chmod(0o700)
        files = sorted(path.name for path in made.iterdir())
        (made / MANIFEST).write_text(json.dumps({"made_from": made_from, "files": files}, indent=1))
        _move_into_place(made, folder, made_from)


def is_intact(folder: Path, made_from: str) -> bool:
    """Whether a folder has this origin and all its files. What is in them is not read."""
    with suppress(Exception):  # missing or unreadable
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["made_from"] == made_from and all((folder / name).stat().st_size for name in manifest["files"])
    return False


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_stale(root: Path) -> None:
    """Remove the working folders that killed runs have left more than a day ago."""
    for path in root.glob("*.new-*"):
        with suppress(OSError):
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
