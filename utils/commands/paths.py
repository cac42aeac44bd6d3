"""Files named in commands: the path in an argument, and writing a file whole or not at all."""

from pathlib import Path

from utils.distributed import run_once
from utils.errors import UserError
from utils.files import replacing
from utils.models.sources import parse_path


def path_in(argument: str, example: str) -> Path:
    """The path that a command was called with. Raises UserError if there is none."""
    if not argument:
        raise UserError(f"give a file, for example: {example}")
    return parse_path(argument)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that does not exist yet. Raises UserError if it exists or cannot be written."""

    def write() -> None:
        # Checked inside run_once: with several ranks, one could already see the file that another one writes.
        if path.exists():
            raise UserError(f"{path} already exists: choose a different name.")
        _write(path, content)

    run_once(write)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, readable for its owner only. Raises UserError if it cannot be written."""
    run_once(lambda: _write(path, content))


def _write(path: Path, content: bytes) -> None:
    try:
        with replacing(path, private=True) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Choose a different folder.") from error
