"""Where servers are and what they are called: one address, its typed form and options, its key, and several addresses.

Only the name of a key's environment variable is stored, and an address cannot contain a key. Nothing is contacted here
and torch is not imported.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from ipaddress import ip_address
from socket import gethostname
from typing import Any, TypeVar
from urllib.parse import urlsplit

from utils.bounds import RealRange, WholeRange
from utils.errors import UserError, check_choice
from utils.text import split_words, visible

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,31}", re.ASCII)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
VERSIONED = re.compile(r"/v\d+$", re.ASCII)
TIMEOUT = RealRange("timeout", 1, 86_400)  # seconds
DEFAULT_TIMEOUT = 120.0
EXAMPLE = "for example http://127.0.0.1:8000"
ADD_EXAMPLE = "/server add plain http://127.0.0.1:8000"
OPTIONS = ("model", "key", "baseline", "same", "timeout", "ca", "omit", "rename")  # in typed addresses
FIELDS = {
    "omit": (r"\w+(,\w+)*", "omit=seed"),
    "rename": (r"\w+:\w+(,\w+:\w+)*", "rename=max_tokens:max_completion_tokens"),
}
SECRET = re.compile(r"(?:(?:key|token|secret)\s*=|--\S*(?:key|token|secret)\s)\s*[\"']?([^\s\"']+)", re.IGNORECASE)
LOOPBACK = "localhost"
NAMES = ("baseline", "same")  # options that name a server
TARGET = "target"  # the baseline that is not a server: the local target alone
SHORTEST_KEY = 8  # characters; shorter placeholders such as EMPTY are not secret and may be words of a text
REMOVED = "[key]"
Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server as the user named it. `server_address` checks the values.

    `url` has no slash at its end; a path such as /v1 may be part of it. `key` is the name of the environment variable
    with the key. `same` names a server, or the target, on an equal machine. `timeout` is the maximum number of seconds
    without new content. `omit` and `rename` change the fields of requests, as in FIELDS.
    """

    name: str
    url: str
    model: str | None = None
    key: str | None = None
    baseline: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    same: str | None = None
    ca: str | None = None
    omit: str | None = None
    rename: str | None = None

    @property
    def root(self) -> str:
        """The URL without the version, for paths of server programs such as /health and /metrics."""
        return VERSIONED.sub("", self.url)

    @property
    def api(self) -> str:
        """The URL of completions, chat completions and the list of models."""
        return self.url if VERSIONED.search(self.url) else f"{self.url}/v1"

    @property
    def host(self) -> str:
        """The host. All addresses of this machine are the same host."""
        host = urlsplit(self.url).hostname or ""
        return LOOPBACK if _is_here(host) else host

    @property
    def sends_key_in_clear(self) -> bool:
        return self.key is not None and self.host != LOOPBACK and self.url.startswith("http:")

    def changed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request, without those to omit and with the new names of those to rename."""
        omitted = (self.omit or "").split(",")
        names = dict(pair.split(":") for pair in (self.rename or "").split(",") if pair)
        return {names.get(field, field): value for field, value in body.items() if field not in omitted}


def server_address(name: str, url: str, **options: Any) -> ServerAddress:
    """A checked address. The options may be texts, as in a config file.

    Raises UserError for an invalid value. Messages never repeat the value of key=.
    """
    if isinstance(options.get("timeout"), str):
        options["timeout"] = TIMEOUT.parse(options["timeout"])
    address = ServerAddress(name, url, **options)
    if not NAME.fullmatch(name):
        raise UserError(
            f"'{visible(name)}' is not a name for a server: use up to 32 letters, digits, dots, hyphens and "
            "underscores, and begin with a letter."
        )
    if address.key is not None and not VARIABLE.fullmatch(address.key):
        # The value is not shown, because it may be the key itself.
        raise UserError("key= takes the name of an environment variable that holds the key, not the key itself.")
    if address.model is not None and (not address.model or not address.model.isprintable()):
        raise UserError("model= needs the name of a model without control characters.")
    if address.baseline == name:
        raise UserError(f"{name} cannot be its own baseline.")
    for option, (pattern, example) in FIELDS.items():
        if not re.fullmatch(f"({pattern})?", getattr(address, option) or "", re.ASCII):
            raise UserError(f"{option}= takes names of fields of a request, for example {example}.")
    TIMEOUT.check(address.timeout)
    return replace(address, url=check_url(url))


def check_url(url: str) -> str:
    """The URL without a slash at its end. Raises UserError unless it is an http or https URL with only a host, a port
    and a path.
    """
    refused = f"'{visible(url)}' is not the URL of a server"
    try:
        parts = urlsplit(url)
        is_complete = bool(parts.hostname) and parts.port != 0 and bool(re.fullmatch(r"[!-~]+", url))
    except ValueError as error:
        raise UserError(f"{refused}, {EXAMPLE}.") from error
    # What holds passwords and keys is not shown.
    if "@" in parts.netloc:
        raise UserError("The URL of a server must not contain a user name or a password: key= names the variable.")
    if parts.query or parts.fragment:
        raise UserError("The URL of a server ends with its path: leave out what follows ? or #.")
    if parts.scheme not in ("http", "https"):
        raise UserError(f"{refused}: it must begin with http:// or https://, {EXAMPLE}.")
    if not is_complete:
        raise UserError(f"{refused}, {EXAMPLE}.")
    return url.rstrip("/")


@cache
def _is_here(host: str) -> bool:
    """Whether a host is this machine: its loopback interface, its name, or the address of one of its interfaces."""
    from psutil import net_if_addrs

    try:
        found = ip_address(host)
        own = (entry.address.partition("%")[0] for entries in net_if_addrs().values() for entry in entries)
        return found.is_loopback or found.is_unspecified or str(found) in own
    except ValueError:
        return host.lower() in (LOOPBACK, gethostname().lower())


def other_machine(one: ServerAddress | None, other: ServerAddress | None) -> str:
    """Why the speeds of two servers are not compared. It is empty if they can be. None is the local target."""
    if one is None or other is None:
        one, other = one or other, None
    if one is None or one.host == (LOOPBACK if other is None else other.host):
        return ""
    name = TARGET if other is None else other.name
    if one.same == name or (other is not None and other.same == one.name):
        return ""
    return (
        f"{one.name} and {name} are on different hosts, so their speeds are not compared; if the machines are equal, "
        f"same={name} in its /server add says so."
    )


def parse_server(text: str) -> ServerAddress:
    """The server in `NAME URL [OPTION=VALUE ...]`, with the options in OPTIONS. Raises UserError for anything else."""
    words = split_words(text)
    if len(words) < 2:
        raise UserError(f"give a name and an address, for example: {ADD_EXAMPLE}")
    return server_address(words[0], words[1], **parse_words(words[2:], OPTIONS, most=0)[1])


def parse_server_flag(text: str, number: int) -> ServerAddress:
    """The server in `[NAME=]URL` with the same options. A server without a name is named by `number`."""
    words = split_words(text)
    if not words:
        raise UserError("--server needs an address, for example http://127.0.0.1:8000.")
    named = re.fullmatch(rf"({NAME.pattern})=(.*)", words[0], re.ASCII)
    name, url = named.groups() if named else (f"s{number}", words[0])
    return server_address(name, url, **parse_words(words[1:], OPTIONS, most=0)[1])


def parse_words(words: Sequence[str], options: Sequence[str], *, most: int) -> tuple[list[str], dict[str, str]]:
    """The plain words, at most `most`, and the values of `NAME=VALUE` by name.

    Raises UserError for unknown or repeated options and for too many words. After an address (`most` is 0), these are
    not shown, because they may be keys.
    """
    plain, values = list[str](), dict[str, str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            plain.append(word)
        elif check_choice(name, tuple(options), "option") in values:
            raise UserError(f"{name}= is given twice.")
        else:
            values[name] = value
    if len(plain) > most:
        extra = f"'{plain[most]}'" if most else "what follows the address"
        raise UserError(f"{extra} is one word too many; options are written as NAME=VALUE: {', '.join(options)}.")
    return plain, values


def parse_numbers(
    values: Mapping[str, str], options: Mapping[str, tuple[Default, WholeRange]]
) -> dict[str, int | Default]:
    """The numbers of all options, which have a default and a range. Raises UserError for an invalid value."""
    numbers: dict[str, int | Default] = {name: default for name, (default, _) in options.items()}
    for name in options.keys() & values.keys():
        try:
            numbers[name] = options[name][1].parse(values[name])
        except UserError as error:
            raise UserError(f"{name}=: {error}") from error
    return numbers


def key_headers(variable: str | None) -> dict[str, str]:
    """The HTTP headers with the key in an environment variable.

    Raises UserError if the variable is not set or if its value cannot be sent.
    """
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"The environment variable {variable}, which should hold the server's key, is not set.")
    if not re.fullmatch(r"[!-~]+", key):
        raise UserError(f"The environment variable {variable} has characters that a key cannot have.")
    return {"Authorization": f"Bearer {key}"}


def without_key(text: str, variable: str | None) -> str:
    """A server's text without its key, which servers may repeat in error messages. Applied to everything that is
    stored.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    return text.replace(key, REMOVED) if len(key) >= SHORTEST_KEY else text


def may_hold_key(line: str) -> bool:
    """Whether a typed command may contain a key instead of the name of its environment variable."""
    return any(value not in os.environ for value in SECRET.findall(line))


def checked(addresses: Sequence[ServerAddress]) -> tuple[ServerAddress, ...]:
    """The addresses themselves. Raises UserError if a name is taken, or if a server that one names is not there."""
    names = [address.name for address in addresses]
    if taken := next((name for place, name in enumerate(names) if name in names[:place]), ""):
        raise UserError(f"There is a server {taken} already; /server remove {taken} removes it.")
    if TARGET in names:
        raise UserError(f"{TARGET} is the local target; choose another name.")
    for address in addresses:
        for option in NAMES:
            if (name := getattr(address, option)) is not None:
                check_choice(name, (*names, TARGET), option)
    return tuple(addresses)


def without_server(addresses: Sequence[ServerAddress], name: str) -> tuple[ServerAddress, ...]:
    """The addresses without one of them, which none of them names any more. Raises UserError for an unknown name."""
    if not addresses:
        raise UserError("There is no server to remove.")
    check_choice(name, tuple(address.name for address in addresses), "server")
    kept = []
    for address in addresses:
        unnamed: dict[str, Any] = {option: None for option in NAMES if getattr(address, option) == name}
        kept += [replace(address, **unnamed)] if address.name != name else []
    return tuple(kept)
