"""Several processes of one run: who one is, and what they say to each other.

Under `accelerate launch` each takes its share of the prompts. Under `torchrun` they compute one target together, each holding a part of its
weights: the first owns the screen and the keyboard, and all do the same with every line. What only one of them can know (a typed line, a
measured time) the first tells the others; all else follows from seeds, and from logits that are the same everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as distributed

Told = TypeVar("Told")
PATIENCE = timedelta(days=365)  # with somebody who has not typed anything yet


def is_first() -> bool:
    """Whether this process is the one that owns the screen."""
    return _number("RANK", 0) == 0


def number_of() -> int:
    """How many processes there are."""
    return _number("WORLD_SIZE", 1)


def together() -> bool:
    """Whether they compute one target together."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ and "ACCELERATE_MIXED_PRECISION" not in os.environ
    return launched and number_of() > 1


def share(prompts: list[str]) -> list[str]:
    """This process's part of the prompts; all of them where it is alone, or where all work on each."""
    return prompts if together() else prompts[_number("RANK", 0) :: number_of()]


def own_device() -> str:
    """The CUDA device of this process."""
    return f"cuda:{_number('LOCAL_RANK', 0)}" if number_of() > 1 else "cuda"


def told(value: Told) -> Told:
    """The first process's value, in all that compute together; one's own value elsewhere. A model must have been loaded."""
    if not together():
        return value
    box: list[Any] = [value]
    distributed.broadcast_object_list(box, src=0, group=_wire())
    value = box[0]
    return value


def heard(lines: Iterable[str]) -> Iterator[str]:
    """The lines that the first process reads, in all that compute together; one's own elsewhere."""
    reading = iter(lines)
    while (line := told(next(reading, None) if is_first() or not together() else None)) is not None:
        yield line


def part(status: int) -> int:
    """End what was set up between processes; the exit status, which the first alone tells where all had the same lines."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return status if is_first() or not together() else 0


def end_if_together() -> None:
    """After a failure that the others may not have had: they would wait for this process for ever."""
    if together():
        sys.exit(1)


@cache
def _wire() -> Any:
    return distributed.new_group(backend="gloo", timeout=PATIENCE)


def _number(name: str, usual: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else usual
