"""An OpenAI-compatible server on loopback for tests: deterministic tokens, a log of requests, and faults to switch on.

    with Loopback() as server:
        server.faults = Faults(cut_after=3)
        ...  # requests to server.url
        assert server.log[-1].body["max_tokens"] == 8

Other folders import it as `servers.loopback`.
"""

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from zlib import crc32

from servers.loopback_values import DONE, Answer, Faults, Received, chunk, error, event

__all__ = ["Faults", "Loopback", "Received"]

VOCABULARY = 1000
PATIENCE = 30.0  # seconds that a silent server keeps a request, at most
Page = tuple[int, str, str]  # status, content type, body


@dataclass(slots=True)
class Loopback:
    """The server. It listens between `__enter__` and `__exit__`, on a port of its own.

    model: the name that /v1/models lists. key: the key that requests must carry, None for any. faults: see Faults.
    stops_after: the model's end token comes after so many tokens, unless the request says ignore_eos. texts: the texts
    of the first tokens, instead of " w17". slots: requests that are computed at the same time; others wait.
    pages: further addresses such as /metrics, or other answers of /health and /v1/models; a page or a function of no
    arguments. posted: further addresses such as /tokenize, as functions of the parsed body.
    extras: fields that are added to the last event, or to the whole answer, such as `timings`. certificate:
    a file with a certificate and its key, for https.
    """

    model: str = "tiny"
    key: str | None = None
    faults: Faults = field(default_factory=Faults)
    stops_after: int | None = None
    texts: Sequence[str] = ()
    slots: int = 64
    pages: dict[str, Page | Callable[[], Page]] = field(default_factory=dict)
    posted: dict[str, Callable[[Any], Page]] = field(default_factory=dict)
    extras: Callable[[Received, Answer], dict[str, Any]] = lambda request, answer: {}
    certificate: str | None = None
    log: list[Received] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _at_once: int = 0
    _server: ThreadingHTTPServer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slots: threading.Semaphore = field(default_factory=threading.Semaphore)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Loopback":
        self._slots = threading.Semaphore(self.slots)
        self._listen(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.die()

    def _listen(self, port: int) -> None:
        self._stopping.clear()
        self._server = _Server(("127.0.0.1", port), self)
        self.url = f"http{'s' * bool(self.certificate)}://127.0.0.1:{self._server.server_address[1]}"
        if self.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def die(self) -> None:
        """Stop listening. Answers that are under way end, too."""
        self._stopping.set()
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            for connection in server.connections:  # clients keep them for their next request
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            server.server_close()

    def revive(self) -> None:
        """Listen again, at the same address."""
        self._listen(self.port)

    def posts(self) -> list[Received]:
        """The logged requests that asked for tokens."""
        return [request for request in self.log if request.method == "POST"]

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than the server listens."""
        self._stopping.wait(seconds)

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """The tokens for a request: a function of prompt, position and, above temperature 0, the seed."""
        prompt = body.get("messages", body.get("prompt", ""))
        seed = body.get("seed") if body.get("temperature", 1.0) > 0 else None
        limit = int(body.get("max_completion_tokens", body.get("max_tokens", 16)))
        ends = self.stops_after is not None and not body.get("ignore_eos") and self.stops_after <= limit
        count = self.stops_after if ends and self.stops_after is not None else limit
        ids = [crc32(json.dumps([prompt, seed, place]).encode()) % VOCABULARY for place in range(count)]
        pieces = [*self.texts[:count], *(f" w{token}" for token in ids[len(self.texts) :])]
        words = prompt if isinstance(prompt, list) else str(prompt).split()
        return Answer(len(words), ids, pieces, "stop" if ends else "length")

    def busy(self, change: int) -> None:
        """Count the requests that are being answered."""
        with self._lock:
            self._at_once += change
            self.most_at_once = max(self.most_at_once, self._at_once)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: Loopback) -> None:
        self.owner = owner
        self.connections: list[socket.socket] = []
        super().__init__(address, _Handler)

    def get_request(self) -> Any:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not worth a message."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a chunk waits for the receipt of the one before
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read `Loopback.log`."""

    def do_GET(self) -> None:
        self._receive(None)
        models = {"object": "list", "data": [{"id": self.server.owner.model, "object": "model"}]}
        pages = {"/health": (200, "text/plain", "OK"), "/v1/models": (200, "application/json", json.dumps(models))}
        page = (pages | self.server.owner.pages).get(self.path, (404, "application/json", error(404, "Not Found")))
        if not self._misbehaves():
            self._page(page() if callable(page) else page)

    def do_POST(self) -> None:
        owner = self.server.owner
        request = self._receive(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self._misbehaves():
            return
        if owner.key is not None and self.headers.get("Authorization") != f"Bearer {owner.key}":
            self._page((401, "application/json", error(401, "Invalid API key.")))
        elif owner.faults.status is not None:
            self._page((owner.faults.status, "application/json", error(owner.faults.status, owner.faults.message)))
        elif self.path in owner.posted:
            self._page(owner.posted[self.path](request.body))
        elif self.path not in ("/v1/completions", "/v1/chat/completions") or request.body is None:
            self._page((404, "application/json", error(404, f"no such address: {self.path}")))
        elif request.body.get("model", owner.model) != owner.model:
            self._page((404, "application/json", error(404, f"The model `{request.body['model']}` does not exist.")))
        else:
            self._complete(request)

    def _receive(self, raw: bytes | None) -> Received:
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = None
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Received(self.command, self.path, headers, body, time.monotonic())
        self.server.owner.log.append(request)
        return request

    def _misbehaves(self) -> bool:
        """Answer with a fault that concerns every request, if one is switched on."""
        faults = self.server.owner.faults
        if faults.silent:
            self.server.owner.wait(PATIENCE)
            self.close_connection = True
        elif faults.redirect is not None:
            self.send_response(307)
            self.send_header("Location", faults.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif faults.trickles in ("headers", "body"):
            self._trickle(faults.trickles)
        elif faults.html:
            self._page((200, "text/html", "<html><body>Welcome to the proxy</body></html>"))
        else:
            return False
        return True

    def _trickle(self, part: str) -> None:
        status = self.server.owner.faults.status or 200
        head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: 99999\r\nX-Long: "
        self.wfile.write((head if part == "headers" else f"{head}no\r\n\r\n").encode())
        while not self.server.owner._stopping.wait(0.02):
            self.wfile.write(b"x")

    def _page(self, page: Page) -> None:
        status, kind, text = page
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _complete(self, request: Received) -> None:
        owner = self.server.owner
        with owner._slots:
            answer = owner.answer(request.body)
            owner.wait(owner.faults.first_delay)
            owner.busy(1)  # only now: a request that has just been answered is counted for a moment longer
            try:
                (self._stream if request.body.get("stream") else self._whole)(request, answer)
            finally:
                owner.busy(-1)

    def _whole(self, request: Received, answer: Answer) -> None:
        owner = self.server.owner
        owner.wait(owner.faults.chunk_delay * (len(answer.ids) - 1))
        full = chunk(request, answer, slice(0, len(answer.ids)), streamed=False)
        full["usage"] = answer.usage if owner.faults.usage else None
        text = json.dumps(full | owner.extras(request, answer))
        if owner.faults.odd_json:
            text = json.dumps(["not", "an", "object"])
        self._page((200, "application/json", text[: len(text) // 2] if owner.faults.broken_json else text))

    def _stream(self, request: Received, answer: Answer) -> None:
        self.send_response(200)
        self.send_header("Content-Type", self.server.owner.faults.content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in self._events(request, answer):
            self._send(text)
        while self.server.owner.faults.trickles == "end" and not self.server.owner._stopping.wait(0.02):
            self._send("\n")
        if not self.close_connection:
            self.wfile.write(b"0\r\n\r\n")

    def _send(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _events(self, request: Received, answer: Answer) -> Iterator[str]:
        """The server-sent events of an answer. A fault that ends the stream sets `close_connection`."""
        owner, faults = self.server.owner, self.server.owner.faults
        if faults.broken_sse:
            yield "this is not an event\nneither is this\n\n"
        size, wrong = faults.tokens_per_chunk, faults.broken_sse
        ends = faults.die_after if faults.die_after is not None else faults.cut_after
        for number, start in enumerate(range(0, len(answer.ids), size)):
            if ends is not None and start >= ends:
                return self._cut()
            owner.wait(faults.chunk_delay if number else 0)
            part = slice(start, min(start + size, len(answer.ids)))
            text = event(chunk(request, answer, part, streamed=True, ids=faults.ids))
            yield self._spoiled(number, text) if not wrong else text.removeprefix("data: ")
        while faults.wordy and not owner._stopping.is_set():
            yield event(chunk(request, answer, slice(0, 1), streamed=True))
        if ends is not None:
            return self._cut()
        yield from self._endings(request, answer) if not wrong else ()

    def _spoiled(self, number: int, text: str) -> str:
        """An event, or what a fault makes of it."""
        faults = self.server.owner.faults
        if number == 1 and faults.broken_json:
            return text[: len(text) // 2] + "\n\n"
        if number == 1 and faults.odd_json:
            return event({"choices": "none today"})
        if number == 2 and faults.error_in_stream:
            return f"data: {error(500, 'the engine has failed')}\n\n"
        return text

    def _endings(self, request: Received, answer: Answer) -> Iterator[str]:
        owner = self.server.owner
        last = chunk(request, answer, slice(0, 0), streamed=True)
        last["choices"][0]["finish_reason"] = answer.finish
        yield event(last | owner.extras(request, answer))
        wanted = (request.body.get("stream_options") or {}).get("include_usage")
        if wanted and owner.faults.usage:
            yield event(last | {"choices": [], "usage": answer.usage})
        yield f"data: {DONE}\n\n"

    def _cut(self) -> None:
        """End the connection early, in the way that the faults say; the whole server if it is to die."""
        faults = self.server.owner.faults
        self.close_connection = True
        if faults.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif faults.abrupt or faults.die_after is not None:
            self.wfile.write(b"40\r\ndata: {")  # less than the size that is announced
        else:
            self.wfile.write(b"0\r\n\r\n")
        if faults.die_after is not None:
            self.server.owner.die()
