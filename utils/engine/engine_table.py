"""The engines, one row each. A new engine needs a row here and its name in `utils.bounds.ENGINES`."""

from collections.abc import Callable
from dataclasses import dataclass

from utils.engine.cuda_graph import CudaGraphEngine
from utils.engine.invariant import InvariantEngine
from utils.engine.layer_engine import LayerEngine
from utils.engine.openvino_engine import OpenVinoEngine
from utils.engine.plain import PlainEngine


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine. Its class says what it promises and which models it supports.

    build: makes a LayerEngine of (models, helpers, weights), see `utils.engine.engine.Engine`. requirements:
    what it needs. computes: how, both as clauses.
    """

    build: Callable[..., LayerEngine]
    requirements: str
    computes: str


LAYER_ENGINES: dict[str, EngineRow] = {
    "plain": EngineRow(PlainEngine, "any model on any device", "PyTorch and transformers as they are"),
    "invariant": EngineRow(InvariantEngine, "full or sliding attention", "row-invariant PyTorch kernels"),
    "cuda_graph": EngineRow(
        CudaGraphEngine, "a CUDA device; full or sliding attention", "forward passes recorded once per verify width"
    ),
    "openvino": EngineRow(OpenVinoEngine, "a decoder that can be read, a CPU, openvino", "OpenVINO between attentions"),
}
