"""The servers of a session, in the order in which they were added, with one connection each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from utils.servers.address import ServerAddress
from utils.servers.connection import Connection


@dataclass(slots=True)
class ServerList:
    """Servers by name. Only `use` changes them."""

    connections: dict[str, Connection] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self.connections.values())

    def __len__(self) -> int:
        return len(self.connections)

    @property
    def addresses(self) -> tuple[ServerAddress, ...]:
        return tuple(connection.address for connection in self)

    def use(self, addresses: Sequence[ServerAddress]) -> None:
        """Use these servers from now on. Connections to servers that stay are kept."""
        before, self.connections = self.connections, {}
        for address in addresses:
            known = before.pop(address.name, None)
            if known is None or known.address != address:
                self.connections[address.name] = Connection(address)
                if known is not None:
                    known.close()
            else:
                self.connections[address.name] = known
        for connection in before.values():
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self:
            connection.close()
