"""The exception for bad input and unusable models, whose message is written for the user.

The message is one complete sentence: what was wrong, what is allowed, and the nearest valid value. The terminal prints
it and continues. Callers of the library can catch it as a ValueError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(ValueError):
    """Bad input or an unusable model, explained in one sentence."""


class ContextOverflow(UserError):
    """A prompt that does not fit into a model's context."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Let messages of user errors in the block begin with what they are about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error


def check_choice(name: str, choices: tuple[str, ...], what: str) -> str:
    """`name` itself, if it is a choice. Otherwise raises a UserError with the choices and the nearest one."""
    if name in choices:
        return name
    nearest = get_close_matches(name, choices, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    known = f"choose one of {', '.join(choices)}" if choices else "there is none"
    raise UserError(f"{what} '{name}' is unknown; {known}.{hint}")
