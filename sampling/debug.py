"""Prints every round of a decoder, for debug=True of the library functions. The screen of the program is not needed."""

from collections.abc import Iterator
from typing import Any

from utils.decode.steps import Step
from utils.text import token_piece


def traced(steps: Iterator[Step], *, enabled: bool, tokenizer: Any = None) -> Iterator[Step]:
    """The same steps, each printed as it passes if `enabled`.

    Signs: + an accepted draft, - a rejected one, = the target's correction, * its bonus token.
    """
    for number, step in enumerate(steps, start=1):
        if enabled:
            print(f"{number:4d} ", *_signed(step, tokenizer))  # noqa: T201
        yield step


def _signed(step: Step, tokenizer: Any) -> Iterator[str]:
    """The tokens of a round with their signs."""
    for position, token in enumerate(step.drafted):
        yield ("+" if position < step.accepted else "-") + token_piece(tokenizer, token)
    if step.token is not None:
        yield ("*" if step.is_bonus else "=") + token_piece(tokenizer, step.token)
