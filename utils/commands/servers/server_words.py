"""Parses the argument of a subcommand of /server: words, options and flags for a server program."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from utils.bounds import WholeRange
from utils.errors import UserError, check_choice

NumberOptions = Mapping[str, tuple[int, WholeRange]]  # defaults and ranges by name
REST = "--"  # everything after it is for the server program


@dataclass(frozen=True, slots=True)
class Words:
    """`plain` words have no equals sign. `options` are values by name, and `flags` follow ` -- `."""

    plain: tuple[str, ...]
    options: Mapping[str, str]
    flags: tuple[str, ...]


def parse_words(argument: str, options: Sequence[str], *, most: int) -> Words:
    """Split an argument, which may quote words as in a shell. `most` is the maximum number of plain words.

    Raises UserError for unknown or repeated options, too many words, and unclosed quotation marks.
    """
    try:
        words = shlex.split(argument)
    except ValueError as error:
        raise UserError("a quotation mark is not closed.") from error
    ours, flags = (words[: words.index(REST)], words[words.index(REST) + 1 :]) if REST in words else (words, [])
    plain, values = [], dict[str, str]()
    for word in ours:
        name, equals, value = word.partition("=")
        if not equals:
            plain.append(word)
            continue
        if check_choice(name, tuple(options), "option") in values:
            raise UserError(f"{name}= is given twice.")
        values[name] = value
    if len(plain) > most:
        raise UserError(
            f"'{plain[most]}' is one word too many; options are written as NAME=VALUE: {', '.join(options)}."
        )
    return Words(tuple(plain), values, tuple(flags))


def parse_numbers(values: Mapping[str, str], options: NumberOptions) -> dict[str, int]:
    """The numbers of all options. An option without a value has its default."""
    return {name: span.parse(values[name]) if name in values else default for name, (default, span) in options.items()}
