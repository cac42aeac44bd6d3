"""Files named in commands: the path in an argument, and whether an existing file may be replaced.

The convention of every command that writes a file: `/save FILE` refuses a file that exists, and `/save FILE overwrite`
replaces it. A command parses its argument with `output_in` and writes with `write_output`.
"""

from dataclasses import dataclass
from pathlib import Path

from utils.errors import UserError
from utils.files import write_file
from utils.models.sources import parse_path

OVERWRITE = "overwrite"  # the word after a file name that allows to replace the file


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write, and whether the user allowed to replace an existing one."""

    path: Path
    overwrite: bool


def path_in(argument: str, example: str) -> Path:
    """The path that a command was called with. Raises UserError if there is none."""
    if not argument:
        raise UserError(f"give a file, for example: {example}")
    return parse_path(argument)


def output_in(argument: str, example: str) -> OutputFile:
    """The file of `FILE` or `FILE overwrite`, the argument of a command that writes. Raises UserError without one."""
    name, _, last = argument.rpartition(" ")
    overwrite = last == OVERWRITE and bool(name.strip())
    return OutputFile(path_in(name.strip() if overwrite else argument, example), overwrite)


def write_output(file: OutputFile, content: bytes) -> None:
    """Write a file, whole or not at all. Raises UserError if it may not be replaced or cannot be written."""
    write_file(file.path, content, overwrite=file.overwrite)
