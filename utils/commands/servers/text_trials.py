"""The same greedy requests again and again, alone and several at once, on a server and on its baseline."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from utils.decode.steps import FinishReason
from utils.metrics.results import first_difference
from utils.servers.completion import Piece, ServerCompletion
from utils.servers.connection import Connection
from utils.servers.request import ServerRequest


@dataclass(frozen=True, slots=True)
class Output:
    """The text of an answer, and its token ids if the server gives them."""

    text: str
    token_ids: tuple[int, ...] | None

    @classmethod
    def of(cls, completion: ServerCompletion) -> "Output":
        return cls(completion.text, completion.token_ids)

    def difference(self, other: "Output") -> int | None:
        """The place of the first difference, in tokens if both have ids and in characters otherwise, or None."""
        if self.token_ids is not None and other.token_ids is not None:
            return first_difference(self.token_ids, other.token_ids)
        return first_difference(self.text, other.text)

    def unit(self, other: "Output") -> str:
        """What `difference` counts."""
        return "token" if self.token_ids is not None and other.token_ids is not None else "character"


class Stopped(Exception):
    """The answers that are under way are not wanted any more."""


def ask(connection: Connection, request: ServerRequest, stop: Event | None = None) -> ServerCompletion:
    """One whole answer. stop: ends it with Stopped. Raises KeyboardInterrupt if Ctrl-C ended it."""

    def watch(piece: Piece) -> None:
        if stop is not None and stop.is_set():
            raise Stopped

    completion = connection.client.complete(request, connection.kind, watch)
    if completion.finish is FinishReason.INTERRUPTED:
        raise KeyboardInterrupt
    return completion


def ask_together(connection: Connection, requests: Sequence[ServerRequest], at_once: int) -> list[Output]:
    """The answers to all requests, so many at a time, in the order of the requests.

    Raises what the first failure raises, after the others have ended.
    """
    stop = Event()
    connection.client.model()  # opens the client and reads the model's name before there are threads
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(ask, connection, request, stop) for request in requests]
        try:
            return [Output.of(future.result()) for future in futures]
        finally:
            stop.set()  # of no effect after the last answer
            for future in futures:
                future.cancel()


def unique(outputs: Sequence[Output]) -> int:
    """Number of different texts."""
    return len(set(outputs))
