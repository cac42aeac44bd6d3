"""Prints every round of a decoder, for debug=True of the library functions."""

from collections.abc import Iterator
from typing import Any

from utils.decode.steps import Step
from utils.screen.renderer import make_renderer


def print_steps(steps: Iterator[Step], tokenizer: Any = None) -> Iterator[Step]:
    """Yield the same steps, and print each one."""
    renderer = make_renderer(interactive=False)
    for number, step in enumerate(steps, start=1):
        renderer.round(number, step, tokenizer)
        yield step
