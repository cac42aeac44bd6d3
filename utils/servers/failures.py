"""One sentence for everything that can go wrong with a server. What the server says itself is data: it is shortened and
its control characters are replaced.
"""

import json
import re
from http import HTTPStatus
from typing import Any

import httpx

from utils.errors import UserError
from utils.servers.address import ServerAddress
from utils.servers.secret import Secret
from utils.text import count_of, visible

LONGEST = 300  # characters of a server's own message
CONNECT_TIMEOUT = 10.0  # seconds


class ServerError(UserError):
    """A request failed. status: the HTTP status if the server answered with an error, otherwise None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def status_error(address: ServerAddress, status: int, body: bytes, secret: Secret) -> ServerError:
    """The error for an answer with a status other than 200."""
    reason = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    said = own_message(body.decode("utf-8", "replace"), secret)
    sentence = f"The server {address.name} answered with the status {status} {reason}".rstrip()
    hint = ""
    if 300 <= status < 400:
        said, hint = "", " It sends requests elsewhere; use the address that it names itself."
    elif status in (401, 403):
        key = f"with the key in {address.key}" if address.key else "without a key (key=VARIABLE names one)"
        hint = f" The request was sent {key}."
    return ServerError((f"{sentence}: {said}" if said else f"{sentence}.") + hint, status)


def transport_error(address: ServerAddress, error: Exception, received: int | None = None) -> ServerError:
    """The error for a connection that failed. received: characters of an answer before that, None before its first."""
    name = f"The server {address.name}"
    match error:
        case httpx.ConnectTimeout():
            text = f"{name} did not accept a connection at {address.url} within {CONNECT_TIMEOUT:g} s."
        case httpx.TimeoutException():
            text = f"{name} sent nothing for too long, so the request was ended (timeout=SECONDS sets how long)."
        case httpx.ConnectError():
            text = f"{name} cannot be reached at {address.url}: {_reason(error)}."
        case _ if received is not None:
            text = f"{name} ended the connection before its answer was complete, {after(received)}."
        case _:
            text = f"{name} ended the connection without a valid answer: {_reason(error)}."
    return ServerError(text)


def stream_error(address: ServerAddress, problem: str, received: int) -> ServerError:
    """The error for a stream that is not what it should be. problem: follows the server's name."""
    return ServerError(f"The server {address.name} {problem}, {after(received)}.")


def after(characters: int) -> str:
    return f"after {count_of(characters, 'character')} of text"


def own_message(body: str, secret: Secret) -> str:
    """What an error says, from the JSON of the usual engines or as text; "" for a page of HTML or nothing."""
    try:
        text = message_in(json.loads(body))
    except (ValueError, RecursionError):
        text = "" if body.lstrip().startswith("<") else body
    return short(str(secret.scrub(text)))


def message_in(value: Any) -> str:
    """The message in the JSON of an error: {"error": {"message": ...}}, {"detail": [{"msg": ...}]} and the like."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return message_in(value[0]) if value else ""
    if isinstance(value, dict):
        names = ("error", "message", "detail", "msg", "error_message")
        return next((found for name in names if (found := message_in(value.get(name)))), "")
    return ""


def short(text: str) -> str:
    """A server's own words as one line that ends like a sentence."""
    line = " ".join(visible(text).split())
    line = line if len(line) <= LONGEST else line[:LONGEST].rstrip() + " ..."
    return line if not line or line[-1] in ".!?" else f"{line}."


def _reason(error: Exception) -> str:
    """The words of the operating system, without its number."""
    text = re.sub(r"^\[(Errno -?\d+|SSL[^\]]*)\]\s*", "", str(error))
    return short(text).rstrip(".") or type(error).__name__
