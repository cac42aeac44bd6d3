"""Prints every round of a decoder as it passes: what debug=True of the library functions does."""

from collections.abc import Iterator
from typing import Any

from utils.decode.steps import Step
from utils.screen.renderer import make_renderer


def print_steps(steps: Iterator[Step], tokenizer: Any = None) -> Iterator[Step]:
    """The same steps, each printed as it passes."""
    renderer = make_renderer(interactive=False)
    for number, step in enumerate(steps, start=1):
        renderer.round(number, step, tokenizer)
        yield step
