"""Cached folders that are either complete or absent.

A manifest with the names of all files is written last, then the folder is renamed into place. So nothing that an
interruption or a full disk leaves behind is mistaken for a model. Nothing heavy is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "manifest.json"


@contextmanager
def build_folder(folder: Path, made_from: str) -> Iterator[Path]:
    """Yield the path of a folder to create and fill. It becomes `folder` if the block ends without an error.

    Temporary files may be written next to it. `made_from` describes the origin, which `is_intact` compares.
    """
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    remove_stale(root)
    with _working_folder(folder) as work:
        made = work / "made"
        yield made
        made.chmod(0o700)
        files = sorted(path.name for path in made.iterdir())
        (made / MANIFEST).write_text(json.dumps({"made_from": made_from, "files": files}, indent=1))
        _move_into_place(made, folder, made_from)


def is_intact(folder: Path, made_from: str) -> bool:
    """Whether a folder has this origin and all its files. What is in them is not read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["made_from"] == made_from and all((folder / name).stat().st_size for name in manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):  # missing or unreadable
        return False


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_stale(root: Path) -> None:
    """Remove the working folders that killed runs have left. Those of running processes are locked."""
    for path in root.glob("*.new-*"):
        with suppress(OSError), _locked(path, wait=False):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _working_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder next to `folder` that is removed afterwards, by a later run if this one is killed."""
    while True:
        with (
            tempfile.TemporaryDirectory(
                prefix=f"{folder.name}.new-", dir=folder.parent, ignore_cleanup_errors=True
            ) as work,
            _locked(Path(work), wait=True),
        ):
            # Another process may have considered it stale before it was locked.
            if Path(work).exists():
                yield Path(work)
                return


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder until the block or the process ends. Raises OSError if it is locked and `wait` is False."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A file system without locks: the folder can be filled, and none is considered stale.
            if not wait:
                raise
        yield
    finally:
        os.close(descriptor)


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
