"""The servers whose speed can be compared with that of a baseline."""

from utils.comparison.harness import Harness
from utils.servers.address import TARGET
from utils.servers.connection import Connection


def comparable_servers(harness: Harness) -> list[Connection]:
    """The servers with a baseline that shares their host."""
    connections = harness.state.servers.connections.values()
    return [connection for connection in connections if _is_comparable(connection, harness)]


def _is_comparable(connection: Connection, harness: Harness) -> bool:
    address, connections = connection.address, harness.state.servers.connections
    if address.baseline == TARGET:
        return address.is_local and harness.has_pair
    return address.baseline in connections and connections[address.baseline].address.host == address.host
