"""Files in the arguments of commands: the path, and whether an existing file may be replaced.

Every command that writes follows this convention: `/save FILE` refuses a file that exists, and `/save FILE overwrite`
replaces it. A command parses its argument with `output_in` and writes with `write_output`.
"""

from dataclasses import dataclass
from pathlib import Path

from utils.errors import UserError
from utils.files import write_file
from utils.models.sources import parse_path

OVERWRITE = "overwrite"  # the word after a file name that permits replacing the file


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write, and whether an existing file may be replaced."""

    path: Path
    overwrite: bool


def path_in(argument: str, example: str) -> Path:
    """The path in an argument. Raises UserError for an empty argument."""
    if not argument:
        raise UserError(f"give a file, for example: {example}")
    return parse_path(argument)


def output_in(argument: str, example: str) -> OutputFile:
    """The file in `FILE` or `FILE overwrite`, the argument of a writing command. Raises UserError without a file."""
    name, _, last = argument.rpartition(" ")
    overwrite = last == OVERWRITE and bool(name.strip())
    return OutputFile(path_in(name.strip() if overwrite else argument, example), overwrite)


def write_output(file: OutputFile, content: bytes) -> None:
    """Write a whole file or nothing. Raises UserError if it must not be replaced or cannot be written."""
    write_file(file.path, content, overwrite=file.overwrite)
