"""The openvino engine: decoders computed by OpenVINO between one attention and the next.

It computes weights of every format, and a verify pass costs little more than a decode step. The modules of the model
stay as they are, with their weights in files, so that they can compute again when the engine is removed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.engine import openvino_support, selftest
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.invariant import DIFFERENT_LOGITS
from utils.engine.kernels import Kernel
from utils.engine.layer_engine import BIT_IDENTICAL, Report, unreported
from utils.engine.lean_decoder import LeanDecoder
from utils.engine.mapped_weights import release_weights
from utils.engine.module_swap import by_weight, restore_linears, swap_linears
from utils.engine.read_decoder import read_decoder
from utils.engine.weight_blocks import round_int8
from utils.engine.weight_format import EngineWeights
from utils.engine.weight_memory import tensor_bytes, weight_format

NOT_HERE = "the openvino engine computes float32 and bfloat16 models on CPUs only"


class OpenVinoEngine:
    """Lean decoders over OpenVINO.

    models: the target, then the drafter if there is one. helpers: modules that are computed with kernels of their own.
    weights: the format of linear weights. folder: for converted weights, which later starts read; None: they are
    removed with the engine.
    """

    promise = BIT_IDENTICAL

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        self._models, self._helpers, self._weights = list(models), list(helpers), weights
        self.weights = weight_format(self._models[0]) if weights.as_loaded else weights.format
        self.layouts: dict[str, int] = {}
        self.folder: Path | None = None
        self._threads = torch.get_num_threads()
        self._segments: list[Any] = []  # OpenVinoSegments of the target and of a drafter with its own weights

    def unsupported(self) -> str:
        """Return why the models cannot be computed this way."""
        if missing := openvino_support.unsupported(self.weights):
            return missing
        return next((reason for reason in map(self._unreadable, self._models) if reason), "")

    def install(self, thread_counts: Sequence[int], report: Report = unreported) -> str:
        """Convert the weights if that has not been done, and run the self-test. Returns why it failed."""
        reference = [selftest.prefill_logits(model) for model in self._models] if self._weights.as_loaded else []
        self._set_forwards(report)
        differing = (
            selftest.differ_beyond_rounding(selftest.prefill_logits(model), logits)
            for model, logits in zip(self._models, reference, strict=False)
        )
        if any(differing):
            return DIFFERENT_LOGITS
        before = self._threads
        for count in [*sorted({*thread_counts, before} - {before}), before]:
            self.set_threads(count)
            if reason := self.self_test(count, report):
                return reason
        return ""

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        """Use the converted weights, which passed the test before, and test one verify width again."""
        self._set_forwards(unreported)
        tests = (selftest.one_width_differs(model, width) for model in self._models)
        return next(filter(None, tests), "")

    def self_test(self, thread_count: int, report: Report = unreported) -> str:
        """Test whole models, and the first layer of the target at every width."""
        tests = (
            selftest.width_dependence(model, [torch.get_num_threads()], every_width=index == 0, report=report)
            for index, model in enumerate(self._models)
        )
        return next(filter(None, tests), "")

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads. Graphs that are in use are compiled again."""
        torch.set_num_threads(count)
        if count != self._threads:
            self._threads = count
            for segments in self._segments:
                segments.set_threads(count)
            if self._segments:
                self._swap_helpers()

    def nbytes(self) -> int:
        """Return the bytes of the weights while the engine is installed."""
        embeddings = {id(table): table for table in (model.get_input_embeddings() for model in self._models)}
        converted = sum(int(segments.nbytes()) for segments in self._segments)
        return converted + tensor_bytes([*embeddings.values(), *self._helpers])

    def remove(self) -> None:
        """Let the models compute again by themselves."""
        for model in self._models:
            vars(model).pop("forward", None)
        restore_linears(self._helpers)
        self._segments = []

    def _unreadable(self, model: PreTrainedModel) -> str:
        if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
            return NOT_HERE
        spec = None if vars(model).get("forward") else read_decoder(model)  # an installed engine has read it
        return spec if isinstance(spec, str) else ""

    def _set_forwards(self, report: Report) -> None:
        specs = [cast(DecoderSpec, read_decoder(model)) for model in self._models]
        for index, (model, spec) in enumerate(zip(self._models, specs, strict=True)):
            report("converting the weights for OpenVINO")
            segments = self._segments[0] if index and _is_cut(spec, specs[0]) else self._converted(model, spec)
            # transformers' forward has only the weights as they were loaded.
            original = model.forward if self._weights.as_loaded else None
            forward = LeanDecoder(spec.without_weights(), segments, model.config, original=original)
            model.forward = cast(Any, forward)
        self._swap_helpers()
        release_weights(self._models, self.folder)

    def _converted(self, model: PreTrainedModel, spec: DecoderSpec) -> Any:
        from utils.engine.openvino_segments import OpenVinoSegments  # takes half a second

        blocks = self._weights.blocks if model is self._models[0] else None
        # The blocks of a file are those of the target.
        kind = "int8" if self.weights == "gguf" and not blocks else self.weights
        weights = EngineWeights(kind, blocks)
        segments = OpenVinoSegments(spec, weights=weights, threads=self._threads, folder=self.folder)
        self._segments.append(segments)
        return segments

    def _swap_helpers(self) -> None:
        from utils.engine.openvino_kernel import OpenVinoKernel

        def build(weight: Tensor, bias: Tensor | None) -> Kernel:
            # Drafts are verified, so rounding a helper's weights changes speed, not texts.
            exact = self.weights in ("float32", "bfloat16")
            return OpenVinoKernel(weight if exact else round_int8(weight.float()), bias, threads=self._threads)

        restore_linears(self._helpers)
        swap_linears(self._helpers, by_weight(build))


def _is_cut(spec: DecoderSpec, target: DecoderSpec) -> bool:
    """Whether a decoder consists of the first layers of the target, with the same weights in memory."""
    if len(spec.layers) > len(target.layers) or spec.head.weight.data_ptr() != target.head.weight.data_ptr():
        return False
    pairs = zip(spec.layers, target.layers, strict=False)
    return all(own.down.weight.data_ptr() == other.down.weight.data_ptr() for own, other in pairs)
