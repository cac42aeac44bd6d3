"""Printing for debug=True of the library functions: the only place where a decoder reaches the screen, on request."""

from collections.abc import Iterator
from typing import Any

from utils.decode.steps import Step


def traced(steps: Iterator[Step], *, enabled: bool, tokenizer: Any = None) -> Iterator[Step]:
    """The same steps, each printed as it passes if `enabled`."""
    if not enabled:
        return steps
    # The one upward import that the ladder of packages allows: it runs only on request.
    from utils.screen.debug_print import print_steps

    return print_steps(steps, tokenizer)
