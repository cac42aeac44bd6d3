"""The same greedy requests again and again, alone and several at once, on a server and on its baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

from utils.decode.steps import FinishReason
from utils.metrics.results import first_difference
from utils.servers.completion import ServerCompletion
from utils.servers.connection import Connection
from utils.servers.failures import ServerError
from utils.servers.load import run_slice
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


def ask(connection: Connection, request: ServerRequest) -> ServerCompletion:
    """One whole answer. Raises KeyboardInterrupt if Ctrl-C ended it."""
    completion = connection.client.complete(request, connection.kind)
    if completion.finish is FinishReason.INTERRUPTED:
        raise KeyboardInterrupt
    return completion


def complete_together(
    connection: Connection, requests: Sequence[ServerRequest], at_once: int
) -> list[ServerCompletion]:
    """The answers to all requests, so many at a time, in the order of the requests. Raises ServerError if one fails."""
    limit = connection.address.timeout * len(requests)  # each request has its own time-outs
    answered = run_slice(connection, requests, concurrency=at_once, limit=limit)
    if answered.failures:
        raise ServerError(answered.failures[0])
    completions = dict(zip(answered.numbers, answered.completions, strict=True))
    return [completions[number] for number in range(len(requests))]


def ask_together(connection: Connection, requests: Sequence[ServerRequest], at_once: int) -> list[Output]:
    """The texts of `complete_together`."""
    return list(map(Output.of, complete_together(connection, requests, at_once)))


def unique(outputs: Sequence[Output]) -> int:
    """Number of different texts."""
    return len(set(outputs))
