"""Cached folders that are either complete or absent.

A manifest with the names of all files is written last, then the folder is renamed into place. So nothing that an
interruption or a full disk leaves behind is mistaken for a model. The working folder of a killed process is removed at
the next start: the lock in it is nobody's any more. Nothing heavy is imported.
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

from safetensors import SafetensorError

from utils.errors import UserError

MANIFEST, LOCK = "manifest.json", "lock"


@contextmanager
def build_folder(folder: Path, made_from: str, what: str, *, needs: int = 0) -> Iterator[Path]:
    """Yield the path of a folder to create and fill. It becomes `folder` if the block ends without an error.

    Temporary files may be written next to it. `made_from` describes the origin, which `is_intact` compares. Raises
    UserError, which calls the content `what`, if it cannot be written or the disk has less than `needs` bytes.
    """
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_stale(root)
        if (free := shutil.disk_usage(root).free) < needs:
            raise OSError(None, f"{free / 1e9:.1f} of {needs / 1e9:.1f} GB free")
        temporary = tempfile.TemporaryDirectory(prefix=f"{folder.name}.new-", dir=root, ignore_cleanup_errors=True)
        with temporary as work, Path(work, LOCK).open("w") as lock:
            with suppress(OSError):  # a file system without locks: then nothing is removed either
                fcntl.flock(lock, fcntl.LOCK_EX)
            made = Path(work, "made")
            yield made
            made.chmod(0o700)
            files = sorted(path.name for path in made.iterdir())
            (made / MANIFEST).write_text(json.dumps({"made_from": made_from, "files": files}, indent=1))
            _move_into_place(made, folder, made_from)
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and "os error" not in str(error):  # that of tokenizers
            raise
        raise UserError(
            f"{what} could not be written to {root} ({getattr(error, 'strerror', None) or error}): free space there, "
            "or set XDG_CACHE_HOME to a writable folder."
        ) from error


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
    """Remove the working folders that killed runs have left."""
    for path in root.glob("*.new-*"):
        with suppress(OSError), (path / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError while its process lives
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
