"""Cached folders that are either complete or absent.

A manifest with the digest of every file is written last, then the folder is renamed into place. So nothing that an
interruption, a full disk or a damaged sector leaves behind is taken for a model. Nothing heavy is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

MANIFEST = "manifest.json"
PIECE = 1 << 25  # bytes; large, because a thread waits for the interpreter after each piece
HASHED_AT_ONCE = 4  # files
_early: dict[tuple[Path, str], tuple[Thread, list[bool]]] = {}


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
        files = {path.name: digest(path) for path in sorted(made.iterdir())}
        (made / MANIFEST).write_text(json.dumps({"made_from": made_from, "files": files}, indent=1))
        _move_into_place(made, folder, made_from)


def check_early(folder: Path, made_from: str) -> None:
    """Begin in a thread what `is_intact` will ask for, while this one does something else."""
    answers: list[bool] = []
    thread = Thread(target=lambda: answers.append(_is_intact(folder, made_from)), daemon=True)
    _early[folder, made_from] = (thread, answers)
    thread.start()


def is_intact(folder: Path, made_from: str) -> bool:
    """Whether a folder has this origin and unchanged files. Hashing takes about a second per gigabyte."""
    if begun := _early.pop((folder, made_from), None):  # once: later calls must see later changes
        thread, answers = begun
        thread.join()
        if answers:
            return answers[0]
    return _is_intact(folder, made_from)


def _is_intact(folder: Path, made_from: str) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        # An empty list would otherwise pass as a folder in which no file has changed.
        if not files or manifest["made_from"] != made_from:
            return False
        # A device that a damaged manifest names would be read without an end.
        regular = all((folder / name).is_file() for name in files)
        if not regular:
            return False
        with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:  # hashing releases the interpreter lock
            return all(pool.map(lambda item: digest(folder / item[0]) == item[1], files.items()))
    # The manifest itself may be damaged: not JSON, or JSON of a different shape.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    result, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            result.update(piece[:size])
    return result.hexdigest()


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
            # Another process may have taken it for stale before it was locked.
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
            # A file system without locks: the folder can be filled, and none is taken for stale.
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
