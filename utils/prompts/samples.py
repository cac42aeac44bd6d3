"""Which prompts of a file are used, and in which order, if it has more than there is time for."""

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from utils.prompts.prompt_files import Prompt

Item = TypeVar("Item")


def spaced(items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """So many of the items, evenly spaced, or all."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count))


def limited(prompts: Sequence[Prompt], count: int) -> list[int]:
    """The places of at most so many prompts of each task, evenly spaced within the task, in the order of the file."""
    by_task: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_task.setdefault(prompt.task, []).append(index)
    return sorted(index for group in by_task.values() for index in spaced(group, count))


def tasks_in_turn(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The first prompt of each task, then the second of each: the first intervals must not be those of one task."""
    seen: Counter[str] = Counter()
    turns = []
    for prompt in prompts:
        turns.append(seen[prompt.task])
        seen[prompt.task] += 1
    return tuple(prompt for _, prompt in sorted(zip(turns, prompts, strict=True), key=lambda pair: pair[0]))
