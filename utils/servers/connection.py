"""Servers in use: one connection with measured answers, and the servers of a session in the order of addition."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from utils.errors import UserError, check_choice
from utils.servers.address import ServerAddress
from utils.servers.client import ServerClient
from utils.servers.kinds import recognise
from utils.servers.kinds.completion import Piece, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import ServerError, ServerKind, own_tokens
from utils.servers.processes.local_servers import LocalServers
from utils.servers.processes.programs import Launch

PATIENCE = 5.0  # seconds for one answer while a server starts
RequestFor = Callable[[ServerKind, ServerClient], ServerRequest]


class Connection:
    """One server. A failure discards everything known about it, because another server may come back.

    `ending` returns how the server has ended if this session started it, otherwise an empty text.
    """

    def __init__(self, address: ServerAddress, ending: Callable[[], str]) -> None:
        self.address = address
        self._ending = ending
        self._client: ServerClient | None = None
        self._kind: ServerKind | None = None

    @property
    def client(self) -> ServerClient:
        if self._client is None:
            self._client = ServerClient(self.address)
        return self._client

    @property
    def kind(self) -> ServerKind:
        """The server kind. Raises ServerError if the server cannot be reached."""
        if self._kind is None:
            self._kind = recognise(self.client)
        return self._kind

    def ask(self, request_for: RequestFor, watch: Callable[[Piece], None] = lambda piece: None) -> ServerCompletion:
        """Request one answer. `request_for` makes the request for the server kind. `watch` is as in
        ServerClient.complete.

        Raises UserError without a complete answer.
        """
        try:
            client, kind = self.client, self.kind
            request = request_for(kind, client)
            before = kind.counters(client)
            completion = client.complete(request, kind, watch)
            after = kind.counters(client)
            drafts = kind.acceptance(completion, before, after)
            others = kind.other_tokens(own_tokens(completion), before, after)
            completion = replace(completion, acceptance=drafts, other_tokens=others, kind=kind.name)
            return replace(completion, request=request, model=client.model())
        except ServerError as error:
            self.close()
            if ending := self._ending():
                raise ServerError(f"{error} {ending}", error.status) from error
            raise
        except UserError as error:  # not supported by the kind of server
            raise UserError(f"The server {self.address.name}: {error}") from error

    def close(self) -> None:
        """Close the connections and discard everything known about the server."""
        client, self._client, self._kind = self._client, None, None
        if client is not None:
            client.close()


def answers(url: str) -> bool:
    """Whether the server at a URL can take requests. Raises UserError if it answers with an error."""
    with ServerClient(ServerAddress("new", url, timeout=PATIENCE)) as client:
        return client.is_ready()


@dataclass(slots=True)
class ServerList:
    """The servers of a session by name.

    `local` has the servers that this session started. `other_texts` has, by server, the prompts whose last greedy text
    differed from the baseline's.
    """

    connections: dict[str, Connection] = field(default_factory=dict)
    local: LocalServers = field(default_factory=lambda: LocalServers(answers))
    other_texts: dict[str, list[str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self.connections.values())

    def __len__(self) -> int:
        return len(self.connections)

    @property
    def addresses(self) -> tuple[ServerAddress, ...]:
        return tuple(connection.address for connection in self)

    def named(self, words: Sequence[str], example: str) -> Connection:
        """The server whose name is the first word of a command. Raises UserError if there is none."""
        if not words:
            names = ", ".join(self.connections) or "none"
            raise UserError(f"which server? This session has {names}; for example {example}.")
        return self.connections[check_choice(words[0], tuple(self.connections), "server")]

    def use(self, addresses: Sequence[ServerAddress]) -> None:
        """Use these servers from now on. Servers that stay keep their connections, and local ones that are missing are
        ended.
        """
        before, self.connections = self.connections, {}
        for address in addresses:
            known = before.get(address.name)
            if known is None or known.address != address:
                known = Connection(address, partial(self.local.ending_of, address.name))
            self.connections[address.name] = known
        for name, connection in before.items():
            if self.connections.get(name) is not connection:
                connection.close()
        self.other_texts = {name: texts for name, texts in self.other_texts.items() if name in self.connections}
        for name in set(self.local.names()) - set(self.connections):
            self.local.stop(name)

    def note_text(self, name: str, prompt: str, same: bool | None) -> None:
        """Remember whether the text for a prompt equals the baseline's. None means that they were not compared."""
        known = self.other_texts.setdefault(name, [])
        if same is not None and prompt in known:
            known.remove(prompt)
        if same is False:
            known.append(prompt)

    def start(self, address: ServerAddress, launch: Launch) -> Iterator[str]:
        """Start a local server and use it from now on. Yields progress. `address` has everything but the URL.

        Raises UserError as LocalServers.start does.
        """
        url = yield from self.local.start(address.name, launch)
        self.use((*self.addresses, replace(address, url=url)))

    def restart(self, name: str, launch: Launch) -> Iterator[str]:
        """Restart a local server in another way. If that fails, it stays in the list without running."""
        self.local.stop(name)
        url = yield from self.local.start(name, launch)
        self.use([replace(one, url=url) if one.name == name else one for one in self.addresses])

    def close(self) -> None:
        """Close all connections, and end the servers that this session started."""
        for connection in self:
            connection.close()
        self.local.stop_all()
