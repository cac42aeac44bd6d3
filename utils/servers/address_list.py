"""Several servers: their names are different, and their baselines exist. Nothing is contacted."""

from collections.abc import Sequence
from dataclasses import replace

from utils.errors import UserError, check_choice
from utils.servers.address import ServerAddress

TARGET = "target"  # the baseline that is not a server: the local target alone
MOST = 32


def merged(configured: Sequence[ServerAddress], given: Sequence[ServerAddress]) -> tuple[ServerAddress, ...]:
    """The servers of the config file and of the flags, which replace those of the same name.

    Raises UserError for two flags of the same name and for a baseline that does not exist.
    """
    names = [address.name for address in given]
    kept = [address for address in configured if address.name not in names]
    addresses: tuple[ServerAddress, ...] = ()
    for address in (*kept, *given):  # their baselines may come later, so these are checked at the end
        with_server(addresses, replace(address, baseline=None))
        addresses = (*addresses, address)
    return check_baselines(addresses)


def with_server(addresses: Sequence[ServerAddress], added: ServerAddress) -> tuple[ServerAddress, ...]:
    """The addresses with one more. Raises UserError if its name is taken."""
    if any(address.name == added.name for address in addresses):
        raise UserError(f"There is a server {added.name} already; /server remove {added.name} removes it.")
    if added.name == TARGET:
        raise UserError(f"{TARGET} is the local target; choose another name.")
    if len(addresses) >= MOST:
        raise UserError(f"At most {MOST} servers can be used at once; /server remove NAME removes one.")
    return check_baselines((*addresses, added))


def without_server(addresses: Sequence[ServerAddress], name: str) -> tuple[ServerAddress, ...]:
    """The addresses without one of them, which is no baseline any more. Raises UserError if there is none."""
    if not addresses:
        raise UserError("There is no server to remove.")
    check_choice(name, tuple(address.name for address in addresses), "server")
    return tuple(
        replace(address, baseline=None) if address.baseline == name else address
        for address in addresses
        if address.name != name
    )


def check_baselines(addresses: Sequence[ServerAddress]) -> tuple[ServerAddress, ...]:
    """The addresses themselves. Raises UserError for a baseline that is not one of them."""
    names = (*(address.name for address in addresses), TARGET)
    for address in addresses:
        if address.baseline is not None:
            check_choice(address.baseline, names, "baseline")
    return tuple(addresses)
