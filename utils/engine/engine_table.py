"""The engines, one row each. A new engine needs a row here and its name in `utils.bounds.ENGINES`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.engine.cuda_graph import CudaGraphEngine
from utils.engine.invariant import InvariantEngine
from utils.engine.layer_engine import LayerEngine, Report, unreported
from utils.engine.stored_weights import fill, release
from utils.engine.weight_format import EngineWeights, placeholder_bytes, tensor_bytes, weight_format


class PlainEngine:
    """The models without replaced layers. It promises nothing, so there is nothing to test."""

    promise = ""
    has_own_forward = False

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        self._models, self._helpers = list(models), list(helpers)
        self._requested = weights
        self.weights = weight_format(models[0])

    def unsupported(self) -> str:
        """Return why the models cannot be computed this way."""
        return "" if self._requested.as_loaded else f"it has no {self._requested.format} weights"

    def need(self) -> int:
        """Return the bytes of the weights that are in files now."""
        return placeholder_bytes(self._models)

    def install(self, report: Report = unreported) -> str:
        """Read the weights that are in files."""
        if self.need():
            report("reading the weights")
        fill(self._models)
        return ""

    def self_test(self, thread_count: int, report: Report = unreported, *, complete: bool = False) -> str:
        """Test nothing."""
        return ""

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads."""
        torch.set_num_threads(count)

    def nbytes(self) -> int:
        """Return the bytes of the weights."""
        return tensor_bytes([*self._models, *self._helpers])

    def remove(self) -> None:
        """Leave weights to their files again."""
        release(self._models)


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
    "invariant": EngineRow(
        InvariantEngine,
        "full or sliding attention",
        "row-invariant kernels, compiled by LLVM for float32 models on a CPU",
    ),
    "cuda_graph": EngineRow(
        CudaGraphEngine, "a CUDA device; full or sliding attention", "forward passes recorded once per verify width"
    ),
}
