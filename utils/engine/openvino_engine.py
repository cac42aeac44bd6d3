"""The openvino engine: decoders computed by OpenVINO between one attention and the next.

It computes weights of every format, and a verify pass costs little more than a decode step. The modules of the model
stay as they are. Graphs are built from the weights at every start, so there are no copies that could be out of date.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.engine import selftest
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.kernels import Kernel
from utils.engine.layer_engine import BIT_IDENTICAL, Report, unreported
from utils.engine.lean_decoder import LeanDecoder
from utils.engine.machine import INTEGER_FEATURES, cpu_features, has_integer_products
from utils.engine.module_swap import by_weight, restore_linears, swap_linears
from utils.engine.read_decoder import read_decoder
from utils.engine.stored_weights import in_files, release
from utils.engine.weight_blocks import round_int8
from utils.engine.weight_format import EngineWeights, decoder_bytes, tensor_bytes, weight_format

NOT_HERE = "the openvino engine computes float32 and bfloat16 models on CPUs only"
BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})
# Small integers are multiplied by instructions for them, or unpacked and multiplied in float32 with AVX2.
UNPACKING_FEATURES = INTEGER_FEATURES | {"avx2"}
REQUIRED = {
    "int8": UNPACKING_FEATURES,
    "int4": UNPACKING_FEATURES,
    "gguf": UNPACKING_FEATURES,
    "bfloat16": BFLOAT16_FEATURES,
}
# These variables limit the instructions of the kernels that OpenVINO calls, but not those that it expects of the
# processor. Under limits that turn off what a format needs it computes nonsense and writes outside its buffers.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_UNPACKING = frozenset({"SSE41", "AVX"})
WITHOUT_INTEGERS = WITHOUT_UNPACKING | {"AVX2"}
WITHOUT_BFLOAT16 = WITHOUT_INTEGERS | {"AVX2_VNNI", "AVX2_VNNI_2"}


def unsupported(weights: str) -> str:
    """Return why OpenVINO cannot compute weights of this format on this machine. OpenVINO itself is not imported."""
    if find_spec("openvino") is None:
        return "the package openvino is not installed"
    required = REQUIRED.get(weights, frozenset())
    if required and required.isdisjoint(cpu_features()):
        return f"{weights} weights need a processor with {' or '.join(sorted(required))}"
    refused = WITHOUT_INTEGERS if has_integer_products() else WITHOUT_UNPACKING
    refused = WITHOUT_BFLOAT16 if weights == "bfloat16" else refused
    limits = ((name, os.environ.get(name, "").upper()) for name in LIMITS)
    limit = next((f"{name}={value}" for name, value in limits if required and value in refused), "")
    return f"{limit} turns off instructions that {weights} weights need" if limit else ""


class OpenVinoEngine:
    """Lean decoders over OpenVINO.

    models: the target, then the drafter if there is one. helpers: modules that are computed with kernels of their own.
    weights: the format of linear weights.
    """

    promise = BIT_IDENTICAL
    has_other_forward = False

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        self._models, self._helpers, self._weights = list(models), list(helpers), weights
        self.weights = weight_format(self._models[0]) if weights.as_loaded else weights.format
        self.layouts: dict[str, int] = {}
        self._threads = torch.get_num_threads()
        self._segments: list[Any] = []  # of the target, and of a drafter with its own weights; while installed

    def unsupported(self) -> str:
        """Return why the models cannot be computed this way."""
        if missing := unsupported(self.weights):
            return missing
        return next((reason for reason in map(self._unreadable, self._models) if reason), "")

    def need(self) -> int:
        """Return the bytes of the weights in OpenVINO's layout."""
        return decoder_bytes(self._models, self._weights)

    def install(self, thread_counts: Sequence[int], report: Report = unreported) -> str:
        """Build and compile the graphs, one layer at a time."""
        self.remove()
        release(self._models)
        specs = [read_decoder(model) for model in self._models]
        if reason := next((spec for spec in specs if isinstance(spec, str)), ""):
            return reason
        self._start(cast(list[DecoderSpec], specs), report)
        return ""

    def self_test(self, thread_count: int, report: Report = unreported, *, complete: bool = False) -> str:
        """Test whole models, and the first layer of the target at every number of rows that graphs compute. Widths in
        between are computed with the next number of rows, so they are tested only if attention was not tested alone.
        """
        self.set_threads(thread_count)
        tested = cast(LeanDecoder, self._models[0].forward).has_tested_attention
        rows = self._segments[0].tested_rows if tested else selftest.EVERY_WIDTH
        tests = (
            selftest.width_dependence(
                model, thread_count, widths=() if index else rows, complete=complete, report=report
            )
            for index, model in enumerate(self._models)
        )
        return next(filter(None, tests), "")

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads. Graphs that are in use are compiled anew."""
        torch.set_num_threads(count)
        before, self._threads = self._threads, count
        if count != before and self._segments:
            for part in self._segments:
                part.set_threads(count)
            restore_linears(self._helpers)
            self._swap_helpers()

    def nbytes(self) -> int:
        """Return the bytes of the weights while the engine is installed."""
        embeddings = {id(table): table for table in (model.get_input_embeddings() for model in self._models)}
        own = sum(int(part.nbytes()) for part in self._segments)
        return own + tensor_bytes([*embeddings.values(), *self._helpers])

    def remove(self) -> None:
        """Let the models compute again by themselves."""
        if self._segments:
            restore_linears(self._helpers)
            for model in self._models:
                vars(model).pop("forward", None)
            self._segments = []

    def _unreadable(self, model: PreTrainedModel) -> str:
        if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
            return NOT_HERE
        spec = read_decoder(model)
        return spec if isinstance(spec, str) else ""

    def _start(self, specs: Sequence[DecoderSpec], report: Report) -> None:
        # A drafter that consists of the first layers of the target is computed by the target's graphs.
        segments = [
            self._built(model, spec, report)
            for index, (model, spec) in enumerate(zip(self._models, specs, strict=True))
            if not index or not _is_cut(spec, specs[0])
        ]
        self._segments = segments
        for model, spec, own in zip(self._models, specs, (segments[0], segments[-1]), strict=False):
            # transformers' forward has only the weights as they were loaded, and none that are in files.
            original = model.forward if self._weights.as_loaded and not in_files(model) else None
            decoder = LeanDecoder(spec.without_weights(), own, model.config, original=original)
            model.forward = cast(Any, decoder)
        self._swap_helpers()

    def _built(self, model: PreTrainedModel, spec: DecoderSpec, report: Report) -> Any:
        from utils.engine.openvino_segments import OpenVinoSegments  # takes half a second

        weights = self._weights if model is self._models[0] else self._weights.for_drafter()
        return OpenVinoSegments(spec, weights=weights, threads=self._threads, known=self.layouts, report=report)

    def _swap_helpers(self) -> None:
        from utils.engine.openvino_segments import OpenVinoKernel

        def build(weight: Tensor, bias: Tensor | None) -> Kernel:
            # Drafts are verified, so rounding a helper's weights changes speed, not texts.
            exact = self.weights in ("float32", "bfloat16")
            return OpenVinoKernel(weight if exact else round_int8(weight.float()), bias, threads=self._threads)

        swap_linears(self._helpers, by_weight(build))


def _is_cut(spec: DecoderSpec, target: DecoderSpec) -> bool:
    """Whether a decoder consists of the first layers of the target, with the same weights."""
    if len(spec.layers) > len(target.layers) or spec.head.weight is not target.head.weight:
        return False
    pairs = zip(spec.layers, target.layers, strict=False)
    return all(own.down.weight is other.down.weight for own, other in pairs)
