"""A stand-in for CUDA graphs on the CPU: it repeats recorded operations on the tensors that they were recorded with.

As with a real graph, Python does not run again: numbers are those of the recording, tensors keep their addresses, and
an operation that has to wait for a value is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

REFUSED = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


class _Operations(TorchDispatchMode):
    """Collects operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket.__name__ in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _tensors(each)]
    if isinstance(value, dict):
        return _tensors([*value.values()])
    return [value] if isinstance(value, Tensor) else []


def storages(value: Any) -> set[int]:
    """Where the tensors of arguments or results are."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(value)}


def _step(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Callable[[], Any], list[Tensor | None]] | None:
    """The operation to repeat, and the tensors that receive its results; None if it only returns views.

    Views, and tensors that are changed in place, hold the new values already.
    """
    given = storages((args, kwargs))
    receivers = [None if storages(each) <= given else each for each in _tensors(result)]
    computes = func._schema.is_mutable or any(each is not None for each in receivers)
    return (partial(func, *args, **kwargs), receivers) if computes else None


class FakeGraph:
    """A recording of `run`. Its outputs are NaN until the first replay."""

    def __init__(self, run: Callable[[], tuple[Tensor, ...]]) -> None:
        run()
        # transformers leaves out comparisons of values while a stream is capturing.
        with (
            mock.patch.object(import_utils, "is_cuda_stream_capturing", lambda: True, create=True),
            _Operations() as recorded,
        ):
            self.outputs = run()
        self.calls, self.replays = recorded.calls, 0
        self._steps = [step for call in self.calls if (step := _step(*call)) is not None]
        for output in self.outputs:
            output.fill_(float("nan"))

    def replay(self) -> None:
        self.replays += 1
        for run, receivers in self._steps:
            for old, new in zip(receivers, _tensors(run()), strict=True):
                if old is not None:
                    old.copy_(new)

    def release(self) -> None:
        """Forget all tensors."""
        self.calls, self._steps, self.outputs = [], [], ()


class FakeRecorder:
    """Takes the place of CudaRecorder."""

    device_type = "cpu"

    def __init__(self, device: torch.device) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, run: Callable[[], tuple[Tensor, ...]]) -> FakeGraph:
        self.graphs.append(FakeGraph(run))
        return self.graphs[-1]
