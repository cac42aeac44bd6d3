"""Multi-process runs: the rank of this process, and values that all processes must agree on.

`accelerate launch` is data parallel: every process decodes a shard of the prompts. `torchrun` is tensor parallel: all
processes compute one target, and rank zero owns the screen, the keyboard and the files. Only what a single rank can
know (a typed line, a measured time) is broadcast; all else follows from the seed and from logits that are equal on all
ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch.distributed as distributed

from utils.errors import UserError

Value = TypeVar("Value")
BROADCAST_TIMEOUT = timedelta(days=365)  # the other ranks wait for a line that the user may type much later


def is_rank_zero() -> bool:
    """Whether this process owns the screen."""
    return _environment_number("RANK", 0) == 0


def world_size() -> int:
    """Number of processes, 1 without a launcher."""
    return _environment_number("WORLD_SIZE", 1)


def is_tensor_parallel() -> bool:
    """Whether several processes compute one target."""
    # accelerate starts its processes with torchrun's launcher too, and sets a variable of its own.
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "ACCELERATE_MIXED_PRECISION" not in os.environ
    return torchrun and world_size() > 1


def reads_and_writes() -> bool:
    """Whether this process reads typed lines and writes files: in tensor-parallel runs only rank zero does."""
    return is_rank_zero() or not is_tensor_parallel()


def shard_prompts(prompts: list[str]) -> list[str]:
    """The prompts that this process decodes: every world_size-th in data-parallel runs, otherwise all."""
    return prompts if is_tensor_parallel() else prompts[_environment_number("RANK", 0) :: world_size()]


def local_device() -> str:
    """The CUDA device of this process."""
    return f"cuda:{_environment_number('LOCAL_RANK', 0)}" if world_size() > 1 else "cuda"


def broadcast(value: Value) -> Value:
    """Rank zero's value in tensor-parallel runs, `value` itself elsewhere. The target must have been loaded before."""
    if not is_tensor_parallel():
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0, group=_host_group())
    return values[0]


def broadcast_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines that rank zero reads in tensor-parallel runs, this process's own lines elsewhere."""
    reader = iter(lines)
    # None is the end of the input, so it is broadcast as well.
    while (line := broadcast(next(reader, None) if reads_and_writes() else None)) is not None:
        yield line


def run_once(action: Callable[[], None]) -> None:
    """Run an action on disk in one of the tensor-parallel processes.

    A UserError that it raises is raised in all of them.
    """
    message = ""
    if reads_and_writes():
        try:
            action()
        except UserError as error:
            message = str(error)
    if message := broadcast(message):
        raise UserError(message)


def shutdown(status: int) -> int:
    """Leave the process group and return the exit status: in tensor-parallel runs only rank zero reports a failure."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return status if reads_and_writes() else 0


def abort_if_tensor_parallel() -> None:
    """Exit after a failure that the other tensor-parallel ranks may not share: they would wait for this one forever."""
    if is_tensor_parallel():
        sys.exit(1)


@cache
def _host_group() -> distributed.ProcessGroup:
    # gloo, because values are host objects, which nccl would move through the GPU.
    group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=BROADCAST_TIMEOUT)
    return group


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default
