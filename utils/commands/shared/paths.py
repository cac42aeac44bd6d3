"""Files in the arguments of commands.

Every command that writes follows this convention: `/save FILE` refuses a file that exists, and `/save FILE overwrite`
replaces it.
"""

from pathlib import Path

from utils.errors import UserError
from utils.models.sources import parse_path

OVERWRITE = "overwrite"  # the word after a file name that permits replacing the file


def path_in(argument: str, example: str) -> Path:
    """The path in an argument. Raises UserError for an empty argument."""
    if not argument:
        raise UserError(f"give a file, for example: {example}")
    return parse_path(argument)


def output_in(argument: str, example: str) -> tuple[Path, bool]:
    """The file in `FILE` or `FILE overwrite`, the argument of a writing command, and whether it may be replaced."""
    name, _, last = argument.rpartition(" ")
    overwrite = last == OVERWRITE and bool(name.strip())
    return path_in(name.strip() if overwrite else argument, example), overwrite
