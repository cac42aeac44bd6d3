"""Several processes of one run, as `accelerate launch` and `torchrun` start them: each takes its share of the prompts, the first speaks.

Nothing is said between them: who one is, and how many there are, stands in the environment, and all append to the same file of records.
"""

from __future__ import annotations

import os


def is_first() -> bool:
    """Whether this process is the one that owns the screen."""
    return _number("RANK", 0) == 0


def share(prompts: list[str]) -> list[str]:
    """This process's part of the prompts; all of them where it is alone."""
    return prompts[_number("RANK", 0) :: _number("WORLD_SIZE", 1)]


def own_device() -> str:
    """The CUDA device of this process."""
    return f"cuda:{_number('LOCAL_RANK', 0)}" if _number("WORLD_SIZE", 1) > 1 else "cuda"


def _number(name: str, usual: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else usual
