"""The plain engine: PyTorch and transformers as they are."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.engine.layer_engine import Report, unreported
from utils.engine.weight_format import EngineWeights
from utils.engine.weight_memory import tensor_bytes, weight_format


class PlainEngine:
    """The models without replaced layers. It promises nothing, so there is nothing to test."""

    promise = ""

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        self._parts: list[nn.Module] = [*models, *helpers]
        self._requested = weights
        self.layouts: dict[str, int] = {}
        self.weights = weight_format(models[0])

    def unsupported(self) -> str:
        """Return why the models cannot be computed this way."""
        return "" if self._requested.as_loaded else f"it has no {self._requested.format} weights"

    def install(self, thread_counts: Sequence[int], report: Report = unreported) -> str:
        """Do nothing: these layers are in place when no others are."""
        return ""

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        """Do nothing, as `install`."""
        return ""

    def self_test(self, thread_count: int, report: Report = unreported) -> str:
        """Test nothing."""
        return ""

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads."""
        torch.set_num_threads(count)

    def nbytes(self) -> int:
        """Return the bytes of the weights."""
        return tensor_bytes(self._parts)

    def remove(self) -> None:
        """Do nothing."""
