"""The one client of all servers: health, models, engine pages, and streamed completions with the times of arrival.

Only the address that the user named is contacted: no redirect, no proxy and no netrc file is followed, and nothing is
tried twice. Every failure is a ServerError, a UserError of one sentence.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from utils.servers.address import ServerAddress
from utils.servers.answer_stream import AnswerStream
from utils.servers.completion import Piece, ServerCompletion
from utils.servers.engines.kind import EngineKind
from utils.servers.failures import CONNECT_TIMEOUT, ServerError, short, status_error, transport_error
from utils.servers.request import ServerRequest
from utils.servers.secret import Secret

Clock = Callable[[], float]
PAGE_TIMEOUT = 30.0  # seconds; pages need no computation
MAX_PAGE = 16_000_000  # bytes of an answer that is not streamed
MAX_MODELS = 10  # that an error lists
UNAVAILABLE = 503


class ServerClient:
    """Requests to one server. It can be used by several threads at once.

    clock: monotonic, in seconds.
    """

    def __init__(self, address: ServerAddress, *, clock: Clock = time.perf_counter) -> None:
        self.address = address
        self._clock = clock
        self._model = address.model
        self._http = httpx.Client(
            follow_redirects=False,
            trust_env=False,  # a proxy or a netrc file would be an address or a password that nobody named here
            # llama.cpp often closes a connection after a stream without saying so, and the next request would fail.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"Accept-Encoding": "identity", "User-Agent": "speculative-decoding"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def is_ready(self) -> bool:
        """Whether the server can take requests. False while nothing listens and while it loads its model.

        Raises ServerError for a server that answers with any other error.
        """
        try:
            if self._page("/health") is None:
                self.models()
        except ServerError as error:
            if error.status == UNAVAILABLE or isinstance(error.__cause__, httpx.TransportError):
                return False
            raise
        return True

    def models(self) -> list[str]:
        """The names of the models that the server offers."""
        try:
            return [str(entry["id"]) for entry in self.get_json("/v1/models")["data"]]
        except (LookupError, TypeError) as error:
            raise ServerError(
                f"The server {self.address.name} gives no list of models: name one with model=."
            ) from error

    def model(self) -> str:
        """The model of the address, or else the only one that the server has. Raises ServerError if there are more."""
        if self._model is None:
            models = self.models()
            if len(models) != 1:
                listed = short(", ".join(models[:MAX_MODELS]) + (", ..." if len(models) > MAX_MODELS else ""))
                raise ServerError(
                    f"The server {self.address.name} has {len(models)} models, so name one with model=: {listed}"
                )
            self._model = models[0]
        return self._model

    def get_json(self, path: str) -> Any:
        """The JSON of a page, or None if the server has no such page or if it is not JSON."""
        return self._parsed(self._page(path))

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that a page answers to a JSON body, or None as in get_json."""
        return self._parsed(self._page(path, dict(body)))

    def _parsed(self, page: bytes | None) -> Any:
        try:
            return None if page is None else self._secret().scrub(json.loads(page))
        except (ValueError, RecursionError):
            return None

    def get_text(self, path: str) -> str | None:
        """The text of a page, or None if the server has no such page."""
        body = self._page(path)
        return None if body is None else str(self._secret().scrub(body.decode("utf-8", "replace")))

    def complete(
        self, request: ServerRequest, kind: EngineKind, watch: Callable[[Piece], None] = lambda piece: None
    ) -> ServerCompletion:
        """Stream one answer. Ctrl-C ends the request: what has arrived is returned with FinishReason.INTERRUPTED.

        The clock starts when the request is sent. watch: receives each piece with content as it arrives; what it raises
        ends the request. Raises ServerError if the answer is not complete.
        """
        url, secret = self._url(kind.path(request)), self._secret()
        body = kind.body(request, self.model())
        stream = AnswerStream(self.address, kind, request, secret)
        began = self._clock()
        try:
            with self._answer("POST", url, body) as response:
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise ServerError(f"The server {self.address.name} answered {url} without a stream of events.")
                for data in response.iter_raw():
                    for piece in stream.add(data, self._clock() - began):
                        watch(piece)
        except KeyboardInterrupt:
            return stream.completion(self._clock() - began, interrupted=True)
        except httpx.HTTPError as error:
            raise transport_error(self.address, error, stream.received) from error
        return stream.completion(self._clock() - began)

    def _secret(self) -> Secret:
        return Secret(self.address.key)

    def _url(self, path: str) -> str:
        # The version of the address may be another one than /v1.
        return self.address.api + path[len("/v1") :] if path.startswith("/v1/") else self.address.root + path

    def _page(self, path: str, sent: dict[str, Any] | None = None) -> bytes | None:
        """The body of a page, or None if the server has no such page. sent: a JSON body to send."""
        page = b""
        try:
            with self._answer("GET" if sent is None else "POST", self._url(path), sent) as response:
                for data in response.iter_raw():
                    page += data
                    if len(page) > MAX_PAGE:
                        raise ServerError(
                            f"The server {self.address.name} sent more than {MAX_PAGE // 1_000_000} MB as {path}."
                        )
        except ServerError as error:
            if error.status in (404, 405, 501):
                return None
            raise
        except httpx.HTTPError as error:
            raise transport_error(self.address, error) from error
        return page

    @contextmanager
    def _answer(self, method: str, url: str, body: dict[str, Any] | None = None) -> Iterator[httpx.Response]:
        """An answer with status 200, whose body is read inside the block. Leaving it early ends the request."""
        secret = self._secret()
        silence = min(PAGE_TIMEOUT, self.address.timeout) if body is None else self.address.timeout
        timeout = httpx.Timeout(silence, connect=CONNECT_TIMEOUT)
        request = self._http.build_request(method, url, json=body, headers=secret.headers, timeout=timeout)
        response = self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                said = next(response.iter_raw(65_536), b"")
                raise status_error(self.address, response.status_code, said, secret)
            yield response
        finally:
            response.close()
