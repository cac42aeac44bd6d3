"""The one exception whose message is written for the person at the keyboard.

Whoever raises it puts a whole sentence in it: what was wrong, what is allowed, what to do instead. The terminal prints that sentence
and goes on; library callers meet an ordinary ValueError.
"""


class UserError(ValueError):
    """Bad input or an unusable model, explained in one sentence."""
