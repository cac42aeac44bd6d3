"""A stand-in for CUDA graphs on the CPU: it repeats recorded operations on the tensors that they were recorded with.

As with a real graph, Python does not run again: numbers are those of the recording, tensors keep their addresses, and
an operation that has to wait for a value is refused.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
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
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


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
        self._calls, self.replays = recorded.calls, 0
        for output in self.outputs:
            output.fill_(float("nan"))

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, result in self._calls:
            for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                # Views, and tensors that were changed in place, hold the new values already.
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class FakeRecorder:
    """Takes the place of CudaRecorder."""

    device_type = "cpu"

    def __init__(self, device: torch.device) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, run: Callable[[], tuple[Tensor, ...]]) -> FakeGraph:
        self.graphs.append(FakeGraph(run))
        return self.graphs[-1]
