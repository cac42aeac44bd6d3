"""/server add, list and remove: which servers every prompt is sent to. No server is contacted here."""

from utils.commands.outcomes import Outcome, Reply, ShowTable, UseServers
from utils.commands.registry import CommandContext
from utils.servers.address import ServerAddress
from utils.servers.address_list import with_server, without_server
from utils.servers.address_words import EXAMPLE, parse_server
from utils.servers.secret import Secret

HEADINGS = ("server", "URL", "model", "baseline", "key")
NONE = f"There is no server; add one, for example: {EXAMPLE}"
IN_CLEAR = "The key will cross the network without encryption: use an https:// address if the server has one."


def add(argument: str, context: CommandContext) -> Outcome:
    added = parse_server(argument)
    Secret(added.key)  # raises UserError for a variable that is not set, while it is easily mended
    addresses = with_server(context.harness.state.servers.addresses, added)
    compared = "" if added.baseline is None else f", compared with {added.baseline}"
    replies = [Reply(f"server {added.name} at {added.url}{compared}: every prompt is sent to it from now on")]
    return [UseServers(addresses), *replies, *([Reply(IN_CLEAR)] if added.sends_key_in_clear else [])]


def show(argument: str, context: CommandContext) -> Outcome:
    addresses = context.harness.state.servers.addresses
    if not addresses:
        return [Reply(NONE)]
    return [ShowTable(HEADINGS, [_row(address) for address in addresses])]


def _row(address: ServerAddress) -> tuple[str, ...]:
    key = "-" if address.key is None else f"${address.key}"
    return address.name, address.url, address.model or "its only one", address.baseline or "-", key


def remove(argument: str, context: CommandContext) -> Outcome:
    addresses = context.harness.state.servers.addresses
    left = without_server(addresses, argument)
    freed = [address.name for address in addresses if address.baseline == argument]
    note = f"; {' and '.join(freed)} now without a baseline" if freed else ""
    return [UseServers(left), Reply(f"server {argument} removed{note}")]
