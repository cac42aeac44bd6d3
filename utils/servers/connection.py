"""A server in use: its client and engine kind, and one measured answer with what the engine says about its drafts."""

from collections.abc import Callable
from dataclasses import dataclass

from utils.errors import UserError
from utils.servers.address import ServerAddress
from utils.servers.client import ServerClient
from utils.servers.completion import Piece, ServerCompletion
from utils.servers.engines.kind import EngineAcceptance, EngineKind
from utils.servers.engines.recognise import recognise
from utils.servers.failures import ServerError
from utils.servers.request import ServerRequest

RequestFor = Callable[[EngineKind, ServerClient], ServerRequest]


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """An answer and where it is from. engine: the name of the engine kind. acceptance: None if nothing is known."""

    request: ServerRequest
    completion: ServerCompletion
    acceptance: EngineAcceptance | None
    engine: str
    model: str


class Connection:
    """One server. What is known about it is forgotten after a failure, because it may come back as another one.

    ending: says how the server has ended if this session has started it, otherwise "".
    """

    def __init__(self, address: ServerAddress, ending: Callable[[], str] = lambda: "") -> None:
        self.address = address
        self._ending = ending
        self._client: ServerClient | None = None
        self._kind: EngineKind | None = None

    @property
    def client(self) -> ServerClient:
        """Its client, opened when it is first needed."""
        if self._client is None:
            self._client = ServerClient(self.address)
        return self._client

    @property
    def kind(self) -> EngineKind:
        """Its engine kind. Raises ServerError if it cannot be reached."""
        if self._kind is None:
            self._kind = recognise(self.client)
        return self._kind

    def ask(self, request_for: RequestFor, watch: Callable[[Piece], None] = lambda piece: None) -> ServerAnswer:
        """One answer. request_for: makes the request for the server's engine kind. watch: see ServerClient.complete.

        Raises UserError if there is no complete answer.
        """
        try:
            client, kind = self.client, self.kind
            request = request_for(kind, client)
            before = kind.counters(client)
            completion = client.complete(request, kind, watch)
            after = kind.counters(client)
            return ServerAnswer(
                request, completion, kind.acceptance(completion, before, after), kind.name, client.model()
            )
        except ServerError as error:
            self.close()
            if ending := self._ending():
                raise ServerError(f"{error} {ending}", error.status) from error
            raise
        except UserError as error:  # what the engine kind does not support
            raise UserError(f"The server {self.address.name}: {error}") from error

    def close(self) -> None:
        """Close the connections and forget what is known about the server."""
        client, self._client, self._kind = self._client, None, None
        if client is not None:
            client.close()
