"""Servers in use: one connection with measured answers, and the servers of a session in the order of addition."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from utils.errors import UserError, check_choice
from utils.servers.address import ServerAddress
from utils.servers.client import ServerClient
from utils.servers.kinds import recognise
from utils.servers.kinds.completion import Piece, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import ServerError, ServerKind, own_tokens
from utils.servers.processes.flags import Speculation
from utils.servers.processes.local_servers import ENDING_SECONDS, LocalServer
from utils.servers.processes.programs import Launch

PATIENCE = 5.0  # seconds for one answer while a server starts
RequestFor = Callable[[ServerKind, ServerClient], ServerRequest]


class Connection:
    """One server. A failure discards everything known about it, because another server may come back.

    `local` is the process of a server that this session has started.
    """

    def __init__(self, address: ServerAddress, local: LocalServer | None = None) -> None:
        self.address = address
        self.local = local
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
            if self.local is not None and (ending := self.local.ending(wait=ENDING_SECONDS)):
                raise ServerError(f"{error} {ending}", error.status) from error
            raise
        except UserError as error:  # not supported by the kind of server
            raise UserError(f"The server {self.address.name}: {error}") from error

    def close(self) -> None:
        """Close the connections and discard everything known about the server."""
        client, self._client, self._kind = self._client, None, None
        if client is not None:
            client.close()

    def end(self) -> None:
        """Close the connections, and end a server that this session has started."""
        self.close()
        if self.local is not None:
            self.local.stop()
            self.local = None


def answers(url: str) -> bool:
    """Whether the server at a URL can take requests. Raises UserError if it answers with an error."""
    with ServerClient(ServerAddress("new", url, timeout=PATIENCE)) as client:
        return client.is_ready()


@dataclass(slots=True)
class ServerList:
    """The servers of a session by name.

    `other_texts` has, by server, the prompts whose last greedy text differed from the baseline's.
    """

    connections: dict[str, Connection] = field(default_factory=dict)
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
        """Use these servers from now on. Those that stay keep their connections, and other local ones are ended."""
        before, self.connections = self.connections, {}
        for address in addresses:
            connection = before.pop(address.name, None) or Connection(address)
            if connection.address != address:
                connection.close()
                connection.address = address
            self.connections[address.name] = connection
        for connection in before.values():
            connection.end()
        self.other_texts = {name: texts for name, texts in self.other_texts.items() if name in self.connections}

    def note_text(self, name: str, prompt: str, same: bool | None) -> None:
        """Remember whether the text for a prompt equals the baseline's. None means that they were not compared."""
        known = self.other_texts.setdefault(name, [])
        if same is not None and prompt in known:
            known.remove(prompt)
        if same is False:
            known.append(prompt)

    def start(self, address: ServerAddress, launch: Launch) -> Iterator[str]:
        """Start a local server and use it from now on. Yields progress. `address` has everything but the URL.

        Raises UserError if it cannot be started or does not get ready.
        """
        yield f"starting {address.name}: {launch.kind}, {launch.model} ..."
        local = LocalServer(address.name, launch)
        yield from local.wait_until_ready(answers)
        self.connections[address.name] = Connection(replace(address, url=local.url), local)

    def restart(self, name: str, launch: Launch) -> Iterator[str]:
        """Restart a local server in another way. If that fails, it stays in the list without running."""
        self.connections[name].end()
        yield from self.start(self.connections[name].address, launch)

    def launch_of(self, name: str) -> Launch:
        """How a server was started. Raises UserError if this session did not start it."""
        launches = {one.address.name: one.local.launch for one in self if one.local is not None}
        if name not in launches:
            started = ", ".join(launches) or "there is none"
            raise UserError(f"'{name}' was not started by this session; name a server that was: {started}.")
        return launches[name]

    def speculation_of(self, name: str) -> Speculation | None:
        """How a server drafts, or None if it does not draft or was not started here."""
        local = self.connections[name].local if name in self.connections else None
        return local.launch.speculation if local is not None and local.launch.drafts else None

    def close(self) -> None:
        """Close all connections, and end the servers that this session started."""
        for connection in self:
            connection.end()
