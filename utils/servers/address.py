"""Where a server is, and what the user calls it. Nothing is contacted here and torch is not imported.

Of a key only the name of its environment variable is kept, and an address cannot contain one.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from utils.bounds import RealRange
from utils.errors import UserError
from utils.text import visible

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,31}", re.ASCII)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
VERSIONED = re.compile(r"/v\d+$", re.ASCII)
TIMEOUT = RealRange("timeout", 1, 86_400)  # seconds
DEFAULT_TIMEOUT = 120.0
EXAMPLE = "for example http://127.0.0.1:8000"
LOOPBACK = "localhost"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server as the user named it. `server_address` checks the values.

    url: without a slash at its end; a path such as /v1 may be part of it. model: None means the only one that the
    server has. key: the name of the environment variable with the key. baseline: the name of the server or strategy
    that its speed and text are compared with. timeout: maximum number of seconds without new content.
    """

    name: str
    url: str
    model: str | None = None
    key: str | None = None
    baseline: str | None = None
    timeout: float = DEFAULT_TIMEOUT

    @property
    def root(self) -> str:
        """The URL above the version, where engines have paths of their own, such as /health and /metrics."""
        return VERSIONED.sub("", self.url)

    @property
    def api(self) -> str:
        """The URL that completions, chat completions and the list of models are below."""
        return self.url if VERSIONED.search(self.url) else f"{self.url}/v1"

    @property
    def host(self) -> str:
        """The host. All addresses of this machine's own loopback interface are the same host."""
        host = urlsplit(self.url).hostname or ""
        return LOOPBACK if _is_loopback(host) else host

    @property
    def is_local(self) -> bool:
        """Whether it is reached over the loopback interface of this machine."""
        return self.host == LOOPBACK

    @property
    def sends_key_in_clear(self) -> bool:
        """Whether a key crosses a network without encryption."""
        return self.key is not None and not self.is_local and self.url.startswith("http:")


def server_address(
    name: str,
    url: str,
    *,
    model: str | None = None,
    key: str | None = None,
    baseline: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> ServerAddress:
    """A checked address. Raises UserError for a value that is not valid. Messages never repeat the value of key=."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"'{visible(name)}' is not a name for a server: use up to 32 letters, digits, dots, hyphens and "
            "underscores, and begin with a letter."
        )
    if key is not None and not VARIABLE.fullmatch(key):
        # The value is not shown: it may be the key itself.
        raise UserError("key= takes the name of an environment variable that holds the key, not the key itself.")
    if model is not None and (not model or not model.isprintable()):
        raise UserError("model= needs the name of a model without control characters.")
    if baseline == name:
        raise UserError(f"{name} cannot be its own baseline.")
    return ServerAddress(name, check_url(url), model, key, baseline, TIMEOUT.check(timeout))


def check_url(url: str) -> str:
    """The URL without a slash at its end. Raises UserError unless it is one of http or https with nothing but a host,
    a port and a path.
    """
    shown = visible(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UserError(f"'{shown}' is not the URL of a server, {EXAMPLE}.") from error
    _check_secrets(parts)
    if parts.scheme not in ("http", "https"):
        raise UserError(f"'{shown}' is not the URL of a server: it must begin with http:// or https://, {EXAMPLE}.")
    if not parts.hostname or port == 0 or not re.fullmatch(r"[!-~]+", url):
        raise UserError(f"'{shown}' is not the URL of a server, {EXAMPLE}.")
    return url.rstrip("/")


def _check_secrets(parts: SplitResult) -> None:
    """Refuse the parts of a URL that hold passwords and keys, without showing them."""
    if "@" in parts.netloc:
        raise UserError("The URL of a server must not contain a user name or a password: key= names the variable.")
    if parts.query or parts.fragment:
        raise UserError("The URL of a server ends with its path: leave out what follows ? or #.")


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False
