"""Files that commands are given: the path in an argument, and writing a file whole or not at all."""

import os
import tempfile
from pathlib import Path

from utils.distributed import is_first, together, told
from utils.errors import UserError
from utils.models.sources import path_of


def path_in(argument: str, example: str) -> Path:
    """The path that a command was given. Raises UserError where there is none."""
    if not argument:
        raise UserError(f"give a file, for example: {example}")
    return path_of(argument)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet. Raises UserError where it is, or cannot be written."""
    if told(path.exists()):
        raise UserError(f"{path} is there already: choose another name.")
    written(path, content)


def written(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all, for its owner alone; of processes that work together the first one's.

    Raises UserError where it cannot be written.
    """
    if problem := told(_written(path, content) if is_first() or not together() else ""):
        raise UserError(problem)


def _written(path: Path, content: bytes) -> str:
    """Why it could not be written, or nothing."""
    try:
        file, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(file, "wb") as writing:
                writing.write(content)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}. Choose another place."
    return ""
