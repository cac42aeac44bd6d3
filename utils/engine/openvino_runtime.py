"""OpenVINO, imported without its telemetry, and the settings with which graphs are compiled.

Only modules that are imported when the engine is used may import this one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from utils.engine.mapped_weights import drop_pages, mapped_ranges


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

__all__ = ["compile_graph", "ops", "ov"]

GROUP_SETTING = "dynamic_group"  # of a graph: the inputs that share one scale when they are rounded to int8
DYNAMIC_GROUP = 32


@cache
def core() -> Any:
    """Return the one OpenVINO runtime of this process."""
    return ov.Core()


def compile_graph(graph: Any, threads: int, *, bfloat16: bool = False) -> Any:
    """Compile a graph for the CPU."""
    key = ["speculative_decoding", GROUP_SETTING]
    group = graph.get_rt_info(key).value if graph.has_rt_info(key) else DYNAMIC_GROUP
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # threads that may move lose less time beside other programs
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": int(group),
    }
    return core().compile_model(graph, "CPU", settings)


def drop_mapped_pages(folder: Path) -> None:
    """Return the memory of files that OpenVINO has mapped. Pages that are needed again are read again.

    Compiled graphs keep the mapping of their file, although they have copied the weights into a layout of their own.
    """
    for part in mapped_ranges():
        if part.path.startswith(f"{folder}/") and not part.changed:
            drop_pages(part.start, part.end - part.start)
