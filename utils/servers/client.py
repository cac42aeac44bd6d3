"""The client of all servers: health, models, pages, and streamed completions with the times of arrival.

Only the user's address is contacted: no redirect, no proxy and no netrc file is followed, and nothing is retried. Every
failure is a ServerError of one sentence. A server's own messages are data: they are shortened, their control characters
are replaced and the key is removed.
"""

import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Self

import httpx

from utils.decode.steps import FinishReason
from utils.files import os_reason
from utils.servers.address import ServerAddress, key_headers, without_key
from utils.servers.kinds.completion import MAX_COUNT, Piece, ServerCompletion, ServerRequest, believed
from utils.servers.kinds.server_kind import ServerError, ServerKind
from utils.text import count_of, visible

CONNECT_TIMEOUT = 10.0  # seconds
PAGE_TIMEOUT = 30.0  # seconds for a whole page; pages need no computation
MAX_PAGE = 16_000_000  # bytes of an answer that is not streamed
MAX_LINE = 8_000_000  # bytes; a server that never ends a line must not fill the memory
MAX_MODELS = 10  # shown in an error
MAX_WORDS = 300  # characters of a server's own message
MAX_CHARACTERS = 64  # per requested token; longer answers are refused
SPARE = 64  # pieces beyond one per requested token, and characters of a finish reason
STREAM = "text/event-stream"  # the content type
DONE = "[DONE]"  # the data of the last event of OpenAI's protocol
CUT = ("length", "limit", "max_tokens")  # finish reasons of answers that reached the maximum number of tokens
ABORTED = ("abort", "error", "content_filter")  # finish reasons of answers that are not complete
TOO_LONG = re.compile(r"context|too (?:large|long)|exceed|reduce the length", re.IGNORECASE)  # not a refused field


class ServerClient:
    """Requests to one server. It can be used by several threads at once."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._model = address.model
        self._http = httpx.Client(
            follow_redirects=False,
            trust_env=False,  # no proxy or netrc file: the user has not named them
            verify=_certificates(address),
            # llama.cpp often closes a connection after a stream without notice, and the next request would fail.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"Accept-Encoding": "identity", "User-Agent": "speculative-decoding"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        """Whether the server can take requests. It cannot while nothing listens or its model is loading.

        Raises ServerError for a server that answers with any other error.
        """
        try:
            if self._page("/health") is None:
                self.models()
        except ServerError as error:
            if error.status == HTTPStatus.SERVICE_UNAVAILABLE or isinstance(error.__cause__, httpx.TransportError):
                return False
            raise
        return True

    def models(self) -> list[str]:
        try:
            names = [str(entry["id"]) for entry in self.get_json("/v1/models")["data"]]
        except (LookupError, TypeError) as error:
            raise ServerError(
                f"The server {self.address.name} gives no list of models: name one with model=."
            ) from error
        return [without_key(name, self.address.key) for name in names]

    def model(self) -> str:
        """The model of the address, or else the server's only model. Raises ServerError if it has several."""
        if self._model is None:
            models = self.models()
            if len(models) != 1:
                listed = words_of(", ".join(models[:MAX_MODELS]) + (", ..." if len(models) > MAX_MODELS else ""))
                raise ServerError(
                    f"The server {self.address.name} has {len(models)} models, so name one with model=: {listed}"
                )
            self._model = models[0]
        return self._model

    def get_json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a page, or what it returns for a JSON body. None if the page does not exist or is not JSON."""
        page = self._page(path, body)
        try:
            return None if page is None else json.loads(page)
        except (ValueError, RecursionError):
            return None

    def get_text(self, path: str) -> str | None:
        page = self._page(path)
        return None if page is None else page.decode("utf-8", "replace")

    def complete(
        self, request: ServerRequest, kind: ServerKind, watch: Callable[[Piece], None] = lambda piece: None
    ) -> ServerCompletion:
        """Stream one answer. Ctrl-C ends the request and returns the partial answer with FinishReason.INTERRUPTED.

        The clock starts when the request is sent. `watch` receives each piece with content as it arrives; its
        exceptions end the request. Raises ServerError if the answer is not complete.
        """
        url = self._url(kind.path(request))
        body = self.address.changed(kind.body(request, self.model()))
        stream = AnswerStream(self.address, kind, request)
        began = time.perf_counter()
        try:
            with self._answer(url, body, self.address.timeout) as response:
                if not response.headers.get("content-type", "").lower().startswith(STREAM):
                    raise self._no_stream(response)
                for data in response.iter_raw():
                    for piece in stream.add(data, time.perf_counter() - began):
                        watch(piece)
                    if stream.is_done:  # it need not close the connection
                        break
        except KeyboardInterrupt:
            return stream.completion(time.perf_counter() - began, interrupted=True)
        except httpx.HTTPError as error:
            raise _transport_error(self.address, error, stream.received) from error
        return stream.completion(time.perf_counter() - began)

    def _url(self, path: str) -> str:
        # The version of the address may differ from /v1.
        return self.address.api + path[len("/v1") :] if path.startswith("/v1/") else self.address.root + path

    def _page(self, path: str, sent: Mapping[str, Any] | None = None) -> bytes | None:
        """The body of a page, or None if the page does not exist. `sent` is a JSON body to send."""
        try:
            with self._answer(self._url(path), sent, min(PAGE_TIMEOUT, self.address.timeout)) as response:
                return self._read(response)
        except ServerError as error:
            if error.status in (404, 405, 501):
                return None
            raise
        except httpx.HTTPError as error:
            raise _transport_error(self.address, error) from error

    @contextmanager
    def _answer(self, url: str, body: Mapping[str, Any] | None, seconds: float) -> Iterator[httpx.Response]:
        """An answer with status 200, whose body is read inside the block. Leaving the block early ends the request.

        The headers must be complete after so many seconds. `body` is JSON to send; without it, a page is requested.
        """
        headers = key_headers(self.address.key) | ({} if body is None else {"Content-Type": "application/json"})
        with _deadline(seconds) as trace:
            request = self._http.build_request(
                "GET" if body is None else "POST",
                url,
                content=None if body is None else json.dumps(body),  # in ASCII, so that it can always be sent
                headers=headers,
                timeout=httpx.Timeout(seconds, connect=CONNECT_TIMEOUT),
                extensions={"trace": trace},
            )
            response = self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise _status_error(self.address, response.status_code, self._begin(response))
            yield response
        finally:
            response.close()

    def _read(self, response: httpx.Response) -> bytes:
        """The body of a page. Raises ServerError if it is too large, and httpx.ReadTimeout if it takes too long."""
        page, end = b"", time.monotonic() + min(PAGE_TIMEOUT, self.address.timeout)
        for data in response.iter_raw():
            page += data
            if len(page) > MAX_PAGE:
                size = f"{MAX_PAGE // 1_000_000} MB"
                raise ServerError(f"The server {self.address.name} sent more than {size} as {response.url.path}.")
            if time.monotonic() > end:  # the timeouts of httpx begin anew with every byte
                raise httpx.ReadTimeout("the page is not complete")
        return page

    def _begin(self, response: httpx.Response) -> str:
        """The message of a body that is not an answer, as far as it can be read."""
        with suppress(httpx.HTTPError, ServerError):
            return own_message(self.address, self._read(response).decode("utf-8", "replace"))
        return ""

    def _no_stream(self, response: httpx.Response) -> ServerError:
        came = own_message(self.address, response.headers.get("content-type", "")).rstrip(".")
        message = self._begin(response)
        return ServerError(
            f"The server {self.address.name} answered {response.url} with {came or 'an unknown type'} instead of a "
            f"stream of events ({STREAM})" + (f": {message}" if message else ".")
        )


def _certificates(address: ServerAddress) -> ssl.SSLContext | bool:
    """The certificates to trust: those of SSL_CERT_FILE or else the usual ones, and those of ca=FILE."""
    if not address.url.startswith("https:"):
        return False  # none is needed, and reading them takes time
    try:
        context = httpx.create_ssl_context()
        if address.ca:
            context.load_verify_locations(os.path.expanduser(address.ca))
    except OSError as error:  # an SSLError is an OSError
        raise ServerError(
            f"The server {address.name}: the certificates of {address.ca or 'SSL_CERT_FILE'} cannot be read: "
            f"{os_reason(error)}."
        ) from error
    return context


@contextmanager
def _deadline(seconds: float) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """Ends the request inside the block after so many seconds, even if bytes arrive. Yields its trace function.

    The timeouts of httpx begin anew with every byte.
    """
    streams, end = list[Any](), time.monotonic() + seconds

    def trace(event: str, facts: Mapping[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            streams.append(facts["return_value"])

    def shut() -> None:
        with suppress(OSError, IndexError):
            streams[-1].get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        yield trace
    except httpx.TransportError as error:
        if time.monotonic() >= end:
            raise httpx.ReadTimeout("the headers are not complete") from error
        raise
    finally:
        timer.cancel()


class AnswerStream:
    """A streamed answer while it arrives: server-sent events become pieces, and finally a ServerCompletion.

    `received` is the number of characters of its text. `is_done` is True after the last event.
    """

    def __init__(self, address: ServerAddress, kind: ServerKind, request: ServerRequest) -> None:
        self._address, self._kind, self._request = address, kind, request
        self._rest = b""  # the beginning of an incomplete line
        self._figures: dict[str, Any] = {}
        self._has_ids = True
        self._pieces: list[Piece] = []
        self._last: float = 0.0  # time of the last content
        self.is_done = False
        self._usage: dict[str, int] = {}
        self._tokens = self.received = 0

    def add(self, data: bytes, seconds: float) -> Iterator[Piece]:
        """The pieces with content in these bytes, which arrived after this many seconds.

        Each event of these servers is one line. httpx's `iter_lines` also ends a line at U+2028 and the like, which
        texts may contain, and has no bound.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise self._error(f"sent a line of more than {MAX_LINE // 1_000_000} MB")
        for line in lines:
            name, _, value = line.decode("utf-8", "replace").partition(":")
            if self.is_done:
                return
            if name == "data":
                yield from self._event(value, seconds)
            elif name == "error":  # not in the standard; llama.cpp has sent errors like this
                raise self._error(f"reported an error: {self._reason(value)}")
        # Comments keep a connection alive, but have no content.
        if seconds - self._last > self._address.timeout:
            raise self._error(f"sent no text for {self._address.timeout:g} s")

    def _event(self, text: str, seconds: float) -> Iterator[Piece]:
        if text.strip() == DONE:
            self.is_done = True
            return
        piece = self._piece(text)
        if piece.finish_reason in ABORTED:
            raise self._error(f"stopped the answer itself ({piece.finish_reason})")
        for name, most in (("prompt_tokens", MAX_COUNT), ("new_tokens", self._request.max_tokens)):
            if (count := believed(getattr(piece, name), most)) is not None:
                self._usage[name] = count
        self._has_ids &= all(
            believed(token, self._request.vocabulary - 1) is not None for token in piece.token_ids or ()
        )
        if piece.text or piece.token_ids or piece.finish_reason:  # the end token comes with the finish reason
            self._last = seconds
            self.received += len(piece.text)
            self._tokens += len(piece.token_ids or ())
            self._pieces.append(replace(piece, seconds=seconds, finish_reason=piece.finish_reason[:SPARE]))
            self._check_length()
            yield piece

    def _piece(self, text: str) -> Piece:
        """The piece of an event. Raises ServerError for error events and for events of an unknown form."""
        try:
            event = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._error("sent an event that is not valid JSON") from error
        if not isinstance(event, dict):
            raise self._error("sent an event that is not a JSON object")
        if event.get("error"):
            raise self._error(f"reported an error: {self._reason(event['error'])}")
        self._figures |= {name: event[name] for name in self._kind.figures if event.get(name) is not None}
        try:
            piece = self._kind.read(event)
            if not isinstance(piece.text, str) or not isinstance(piece.finish_reason, str):
                raise TypeError("a text is not a string")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._error("sent an event that is not part of a completion") from error
        return piece

    def _check_length(self) -> None:
        """End an answer of a server that ignores the maximum number of tokens."""
        most = self._request.max_tokens
        bound = most + SPARE
        if self._tokens > most or len(self._pieces) > bound or self.received > MAX_CHARACTERS * bound:
            raise self._error(f"sent more than the {most} tokens that were requested")

    def completion(self, seconds: float, *, interrupted: bool = False) -> ServerCompletion:
        """The completion at the end of the stream. Raises ServerError if the stream ended too early."""
        pieces = tuple(piece if self._has_ids else replace(piece, token_ids=None) for piece in self._pieces)
        reason = next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason), "")
        if not interrupted and not reason and not self.is_done:
            raise self._error("ended the stream before the text was complete")
        finish = FinishReason.LENGTH if reason in CUT else FinishReason.STOP
        new_tokens = self._usage.get("new_tokens")
        return ServerCompletion(
            text=without_key("".join(piece.text for piece in pieces), self._address.key),
            pieces=pieces,
            finish=FinishReason.INTERRUPTED if interrupted else finish,
            finish_reason=without_key(reason, self._address.key),
            seconds=seconds,
            prompt_tokens=self._usage.get("prompt_tokens"),
            usage_tokens=None if self.received and not new_tokens else new_tokens,  # a text has tokens
            figures=self._figures,
            own_rate=self._kind.own_rate(self._figures),
        )

    def _reason(self, value: Any) -> str:
        return own_message(self._address, value).rstrip(".") or "no reason given"

    def _error(self, problem: str) -> ServerError:
        """An error for an invalid stream. `problem` follows the server's name."""
        return ServerError(f"The server {self._address.name} {problem}, {_after(self.received)}.")


def _status_error(address: ServerAddress, status: int, message: str) -> ServerError:
    """An error for an answer with a status other than 200. `message` is the server's own."""
    reason = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    sentence = f"The server {address.name} answered with the status {status} {reason}".rstrip()
    hint = ""
    if 300 <= status < 400:
        message, hint = "", " It sends requests elsewhere; use the address that it names itself."
    elif status in (401, 403):
        key = f"with the key in {address.key}" if address.key else "without a key (key=VARIABLE names one)"
        hint = f" The request was sent {key}."
    elif status in (400, 422) and not TOO_LONG.search(message):
        hint = " If it refuses a field, omit=FIELD or rename=FIELD:NAME in /server add changes what is sent."
    return ServerError((f"{sentence}: {message}" if message else f"{sentence}.") + hint, status)


def _transport_error(address: ServerAddress, error: Exception, received: int | None = None) -> ServerError:
    """An error for a connection that failed. `received` counts the characters of the answer, or is None before any
    arrived.
    """
    name = f"The server {address.name}"
    # The operating system's message, without its number.
    reason = re.sub(r"^\[(Errno -?\d+|SSL[^\]]*)\]\s*", "", without_key(str(error), address.key))
    reason = words_of(reason).rstrip(".") or type(error).__name__
    match error:
        case httpx.ConnectTimeout():
            text = f"{name} did not accept a connection at {address.url} within {CONNECT_TIMEOUT:g} s."
        case httpx.TimeoutException():
            text = f"{name} took too long to answer, so the request was ended (timeout=SECONDS sets how long)."
        case httpx.ConnectError() if "CERTIFICATE_VERIFY_FAILED" in str(error):
            text = f"{name} has a certificate that is not trusted: {reason}. ca=FILE or SSL_CERT_FILE can name its own."
        case httpx.ConnectError():
            text = f"{name} cannot be reached at {address.url}: {reason}."
        case _ if received is not None:
            text = f"{name} ended the connection before its answer was complete, {_after(received)}."
        case _:
            text = f"{name} ended the connection without a valid answer: {reason}."
    return ServerError(text)


def _after(characters: int) -> str:
    return f"after {count_of(characters, 'character')} of text"


def own_message(address: ServerAddress, value: Any) -> str:
    """The message of an error from its JSON, parsed or as text. It is empty for a page of HTML."""
    try:
        text = _message_in(json.loads(value) if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        text = value if isinstance(value, str) and not value.lstrip().startswith("<") else ""
    return words_of(without_key(text, address.key))


def _message_in(value: Any) -> str:
    """The message in the JSON of an error: {"error": {"message": ...}}, {"detail": [{"msg": ...}]} and the like."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _message_in(value[0]) if value else ""
    if isinstance(value, dict):
        names = ("error", "message", "detail", "msg", "error_message")
        return next((found for name in names if (found := _message_in(value.get(name)))), "")
    return ""


def words_of(text: str) -> str:
    """A server's message as one line that ends like a sentence."""
    line = " ".join(visible(text).split())
    line = line if len(line) <= MAX_WORDS else line[:MAX_WORDS].rstrip() + " ..."
    return line if not line or line[-1] in ".!?" else f"{line}."
