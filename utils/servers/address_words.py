"""Servers as they are typed: `NAME URL OPTION=VALUE ...` after /server add, `[NAME=]URL OPTION=VALUE ...` in a flag."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from utils.errors import UserError, check_choice
from utils.servers.address import NAME, TIMEOUT, ServerAddress, server_address

OPTIONS = ("model", "key", "baseline", "timeout")
EXAMPLE = "/server add plain http://127.0.0.1:8000"


def parse_server(text: str) -> ServerAddress:
    """The server that `NAME URL [model=...] [key=VARIABLE] [baseline=NAME] [timeout=SECONDS]` describes.

    Raises UserError for anything else. Values of unknown words are not repeated, because they may be keys.
    """
    words = _words(text)
    if len(words) < 2:
        raise UserError(f"give a name and an address, for example: {EXAMPLE}")
    return _server(words[0], words[1], words[2:])


def parse_server_flag(text: str, number: int) -> ServerAddress:
    """The server that `[NAME=]URL` with the same options describes. number: makes the name of one without a name."""
    words = _words(text)
    if not words:
        raise UserError("--server needs an address, for example http://127.0.0.1:8000.")
    named = re.fullmatch(rf"({NAME.pattern})=(.*)", words[0], re.ASCII)
    name, url = named.groups() if named else (f"s{number}", words[0])
    return _server(name, url, words[1:])


def server_of(name: str, values: Mapping[str, str]) -> ServerAddress:
    """The server with this name, url and options, all of them as text. Raises UserError for invalid ones."""
    options = dict(values)
    timeout = {"timeout": TIMEOUT.parse(options.pop("timeout"))} if "timeout" in options else {}
    return server_address(name, **options, **timeout)  # type: ignore[arg-type]


def _server(name: str, url: str, words: Sequence[str]) -> ServerAddress:
    values: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"a word after the address is not OPTION=VALUE; the options are {', '.join(OPTIONS)}.")
        values[check_choice(option, OPTIONS, "option")] = value
    return server_of(name, {"url": url, **values})


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError("a quotation mark is not closed.") from error


def may_hold_key(line: str) -> bool:
    """Whether a typed line may have a key itself where the name of its environment variable belongs."""
    values = re.findall(r"\bkey\s*=\s*[\"']?([^\s\"']+)", line) if line.lstrip().startswith("/server") else []
    return any(value not in os.environ for value in values)
