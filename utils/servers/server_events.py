"""Server-sent events: the lines of a streamed answer as the data of its events.

Bytes arrive in any pieces, and an event may be cut anywhere. https://html.spec.whatwg.org/multipage/server-sent-events
"""

from collections.abc import Iterator

from utils.errors import UserError

MAX_EVENT = 8_000_000  # bytes; a server that never ends a line must not fill the memory
DONE = "[DONE]"  # the data of the last event of OpenAI's protocol


class EventReader:
    """Collects bytes and returns the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._after_return = False  # the last bytes ended with CR, which an LF may follow

    def add(self, data: bytes) -> Iterator[str]:
        """The data of the events that these bytes complete. Raises UserError for an event without an end."""
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        self._after_return = data.endswith(b"\r") if data else self._after_return
        # Not splitlines(), because other separators may occur inside a line.
        lines = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT:
            raise UserError(f"it sent an event of more than {MAX_EVENT // 1_000_000} MB.")
        for line in lines:
            if not line:
                yield from self._finished()
            elif line.startswith(b"data:"):
                self._data.append(line[5:].decode("utf-8", "replace").removeprefix(" "))
            elif line.startswith(b"error:"):  # not in the standard; llama.cpp has sent errors like this
                self._data.append('{"error":' + line[6:].decode("utf-8", "replace") + "}")

    def _finished(self) -> Iterator[str]:
        if self._data:
            yield "\n".join(self._data)
        self._data = []
