"""Folders that this program made and keeps: each is there as a whole, or not at all.

A manifest of digests is written last and everything is moved into place at once: what an interruption, a full disk or a bad sector left
behind never passes for a model. Nothing heavy is imported.
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


def cache_root() -> Path:
    """Where this program keeps what it made: `$XDG_CACHE_HOME/speculative-decoding`, by default below ~/.cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The base directory specification says to ignore a relative path.
    return (given if given.is_absolute() else Path.home() / ".cache") / "speculative-decoding"


@contextmanager
def making(folder: Path, made_from: str) -> Iterator[Path]:
    """A place to write the folder to, beside which there is room for more; it becomes `folder` when the block ends without an error."""
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.new-", dir=root, ignore_cleanup_errors=True) as work:
        made = Path(work) / "made"
        yield made
        made.chmod(0o700)
        files = {path.name: digest(path) for path in sorted(made.iterdir())}
        (made / MANIFEST).write_text(json.dumps({"made_from": made_from, "files": files}, indent=1))
        _put_in_place(made, folder, made_from)


def is_whole(folder: Path, made_from: str) -> bool:
    """Whether every file is there as it was written, from the same. Hashing takes about a second per gigabyte."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        return (
            bool(files)
            and manifest["made_from"] == made_from
            and all(digest(folder / name) == sha for name, sha in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sweep(folder: Path) -> None:
    """Remove the working folders of killed runs; a young one may belong to a run that is still at it."""
    for left in folder.parent.glob(f"{folder.name}.new-*"):
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _put_in_place(made: Path, folder: Path, made_from: str) -> None:
    """Two processes may arrive here together: whoever finds a sound folder in place keeps it and drops its own."""
    try:
        os.replace(made, folder)
    except OSError:
        if is_whole(folder, made_from):
            return
        # A folder can only replace an empty one: the damaged one leaves with the working folder.
        os.replace(folder, made.with_name("damaged"))
        os.replace(made, folder)
