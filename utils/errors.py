"""The one exception whose message is written for the person at the keyboard.

Whoever raises it puts a whole sentence in it: what was wrong, what is allowed, what to do instead. The terminal prints that sentence
and goes on; library callers meet an ordinary ValueError.
"""

from difflib import get_close_matches


class UserError(ValueError):
    """Bad input or an unusable model, explained in one sentence."""


class NoRoom(UserError):
    """A prompt that is longer than a model's context."""


def one_of(name: str, names: tuple[str, ...], what: str) -> str:
    """`name` if it is among `names`; otherwise UserError with the nearest and all of them."""
    if name in names:
        return name
    near = get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UserError(f"{what} '{name}' is unknown; choose one of {', '.join(names)}.{hint}")
