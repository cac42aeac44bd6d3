"""The servers of a session, in the order in which they were added, with one connection each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from utils.servers.address import ServerAddress
from utils.servers.address_list import with_server
from utils.servers.connection import Connection
from utils.servers.processes.launch import Launch
from utils.servers.processes.local_servers import LocalServers


@dataclass(slots=True)
class ServerList:
    """Servers by name. local: those of them that this session has started. other_texts: by server, the prompts on which
    its greedy text was last not that of its baseline.
    """

    connections: dict[str, Connection] = field(default_factory=dict)
    local: LocalServers = field(default_factory=LocalServers)
    other_texts: dict[str, list[str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self.connections.values())

    def __len__(self) -> int:
        return len(self.connections)

    @property
    def addresses(self) -> tuple[ServerAddress, ...]:
        return tuple(connection.address for connection in self)

    def use(self, addresses: Sequence[ServerAddress]) -> None:
        """Use these servers from now on. Connections to servers that stay are kept. A server that this session has
        started ends if it is not among them.
        """
        before, self.connections = self.connections, {}
        for address in addresses:
            known = before.pop(address.name, None)
            if known is None or known.address != address:
                self.connections[address.name] = Connection(address, partial(self.local.ending_of, address.name))
                if known is not None:
                    known.close()
            else:
                self.connections[address.name] = known
        for connection in before.values():
            connection.close()
        self.other_texts = {name: texts for name, texts in self.other_texts.items() if name in self.connections}
        for name in self.local.names():
            if name not in self.connections:
                self.local.stop(name)

    def note_text(self, name: str, prompt: str, same: bool | None) -> None:
        """Remember whether the text for a prompt was that of the server's baseline. None: it was not compared."""
        known = self.other_texts.setdefault(name, [])
        if same is not None and prompt in known:
            known.remove(prompt)
        if same is False:
            known.append(prompt)

    def start(self, address: ServerAddress, launch: Launch, *, limit: float) -> Iterator[str]:
        """Start a local server and use it from now on. Yields lines of progress. address: all but its URL.

        Raises UserError as LocalServers.start does, and for a name that is taken.
        """
        with_server(self.addresses, address)
        url = yield from self.local.start(address.name, launch, limit=limit)
        self.use((*self.addresses, replace(address, url=url, model=self.local.model_of(address.name))))

    def restart(self, name: str, launch: Launch) -> Iterator[str]:
        """Start a local server again, in another way. If that fails, it stays in the list without running."""
        if name in self.local.names():
            self.local.stop(name)
        url = yield from self.local.start(name, launch)
        model = self.local.model_of(name)
        self.use([replace(one, url=url, model=model) if one.name == name else one for one in self.addresses])

    def close(self) -> None:
        """Close all connections, and end the servers that this session has started."""
        for connection in self:
            connection.close()
        self.local.stop_all()
