"""A streamed answer while it arrives: bytes become events, pieces and at last a ServerCompletion.

Whatever is wrong with a stream is reported here: events that are not JSON, errors inside it, an end that is missing.
"""

import json
from collections.abc import Iterator
from typing import Any

from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.servers.address import ServerAddress
from utils.servers.completion import Arrival, Event, Piece, ServerCompletion, finish_of
from utils.servers.engines.kind import EngineKind
from utils.servers.failures import ServerError, message_in, short, stream_error
from utils.servers.request import ServerRequest
from utils.servers.secret import Secret, SecretStream
from utils.servers.server_events import DONE, EventReader

MOST_CHARACTERS = 64  # per requested token; more than that is not an answer to the request
SPARE = 64  # pieces beyond one per requested token
ABORTED = ("abort", "error")  # finish reasons of answers that are not complete


class AnswerStream:
    """Collects one answer. received: number of characters of its text so far."""

    def __init__(self, address: ServerAddress, kind: EngineKind, request: ServerRequest, secret: Secret) -> None:
        self._address, self._kind, self._request, self._secret = address, kind, request, secret
        self._reader, self._shown = EventReader(), SecretStream(secret)
        self._events: list[Event] = []
        self._arrivals: list[Arrival] = []
        self._last: float = 0.0  # when the last content arrived
        self._is_done = False
        self._usage = Piece()
        self._tokens = self.received = 0

    def add(self, data: bytes, seconds: float) -> Iterator[Piece]:
        """The pieces with content in these bytes, which arrived after so many seconds."""
        try:
            for text in self._reader.add(data):
                if not self._is_done:
                    yield from self._event(text, seconds)
        except ServerError:
            raise
        except UserError as error:
            raise stream_error(
                self._address, f"cannot be understood: {str(error).rstrip('.')}", self.received
            ) from error
        # Comments keep a connection alive, but they are no content.
        if seconds - self._last > self._address.timeout:
            raise stream_error(self._address, f"sent no text for {self._address.timeout:g} s", self.received)

    def _event(self, text: str, seconds: float) -> Iterator[Piece]:
        if text.strip() == DONE:
            self._is_done = True
            return
        piece = self._piece(self._parsed(text))
        if piece.finish_reason in ABORTED:
            raise stream_error(self._address, f"stopped the answer itself ({piece.finish_reason})", self.received)
        self._usage = Piece(
            prompt_tokens=self._usage.prompt_tokens if piece.prompt_tokens is None else piece.prompt_tokens,
            new_tokens=self._usage.new_tokens if piece.new_tokens is None else piece.new_tokens,
        )
        if piece.has_content:
            self._last = seconds
            self.received += len(piece.text)
            self._tokens += len(piece.token_ids or ())
            self._arrivals.append(Arrival(seconds, piece))
            self._check_length()
            yield piece

    def _parsed(self, text: str) -> dict[str, Any]:
        """The JSON object of an event. Raises ServerError if it is none, or if it is an error."""
        try:
            event = self._secret.scrub(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise stream_error(self._address, "sent an event that is not valid JSON", self.received) from error
        if not isinstance(event, dict):
            raise stream_error(self._address, "sent an event that is not a JSON object", self.received)
        if event.get("error"):
            said = short(message_in(event["error"])) or "no reason given."
            raise stream_error(self._address, f"reported an error: {said.rstrip('.')}", self.received)
        self._events.append(event)
        return event

    def _piece(self, event: Event) -> Piece:
        """The piece of an event, with text that can be shown. Raises ServerError for an event of another shape."""
        try:
            piece = self._kind.read(event)
            _check_types(piece)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise stream_error(
                self._address, "sent an event that is not part of a completion", self.received
            ) from error
        shown = self._shown.add(piece.text)
        if piece.finish_reason:
            shown += self._shown.end()
        return Piece(shown, piece.token_ids, piece.finish_reason, piece.prompt_tokens, piece.new_tokens)

    def _check_length(self) -> None:
        """End an answer of a server that ignores the maximum number of tokens."""
        most = self._request.max_tokens
        bound = most + SPARE
        if self._tokens > most or len(self._arrivals) > bound or self.received > MOST_CHARACTERS * bound:
            raise stream_error(self._address, f"sent more than the {most} tokens that were requested", self.received)

    def completion(self, seconds: float, *, interrupted: bool = False) -> ServerCompletion:
        """The answer at the end of the stream. Raises ServerError if it ended too early."""
        pieces = [arrival.piece for arrival in self._arrivals]
        reason = next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason), "")
        if not interrupted and not reason and not self._is_done:
            raise stream_error(self._address, "ended the stream before the text was complete", self.received)
        return ServerCompletion(
            text="".join(piece.text for piece in pieces) + self._shown.end(),
            arrivals=tuple(self._arrivals),
            finish=FinishReason.INTERRUPTED if interrupted else finish_of(reason),
            finish_reason=reason,
            seconds=seconds,
            prompt_tokens=self._usage.prompt_tokens,
            usage_tokens=self._usage.new_tokens,
            events=tuple(self._events),
        )


def _check_types(piece: Piece) -> None:
    """Raises TypeError if a value is not of the type that its field declares."""
    counts = (piece.prompt_tokens, piece.new_tokens, *(piece.token_ids or ()))
    if not isinstance(piece.text, str) or not isinstance(piece.finish_reason, str):
        raise TypeError("a text is not a string")
    if any(
        count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0) for count in counts
    ):
        raise TypeError("a number of tokens is not a whole number")
