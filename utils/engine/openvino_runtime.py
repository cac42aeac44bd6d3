"""OpenVINO, imported without its telemetry, and the settings with which graphs are compiled.

Only modules that are imported when the engine is used may import this one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Make imports of the telemetry client fail, so that OpenVINO's stub takes its place. The client would report the
    import itself.
    """
    name = "openvino_telemetry"
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


with _without_telemetry():
    import openvino as ov
    from openvino import opset13 as ops

__all__ = ["DYNAMIC_GROUP", "FLOAT", "compile_graph", "ops", "ov", "sizes"]

FLOAT = ov.Type.f32
DYNAMIC_GROUP = 32  # inputs that share one scale when they are rounded to int8


@cache
def core() -> Any:
    """Return the one OpenVINO runtime of this process."""
    return ov.Core()


def compile_graph(graph: Any, threads: int, *, group: int = DYNAMIC_GROUP, bfloat16: bool = False) -> Any:
    """Compile a graph for the CPU. group: how many inputs may share a scale when they are rounded."""
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # threads that may move lose less time beside other programs
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
    }
    return core().compile_model(graph, "CPU", settings)


def sizes(*values: int) -> Any:
    """Return a node with integers, such as a shape."""
    return ops.constant(np.array(values, dtype=np.int64))
