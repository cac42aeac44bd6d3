"""The openvino engine: decoders computed by OpenVINO between one attention and the next.

It computes weights of every format, and a verify pass costs little more than a decode step. The modules of the model
stay as they are, with their weights in files, so that they can compute again when the engine is removed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from utils.freed_memory import release_memory

SPARE = 3  # graphs are kept during trials if there is memory for this many more of them
NOT_HERE = "the openvino engine computes float32 and bfloat16 models on CPUs only"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Graphs that were compiled for one number of threads.

    segments: OpenVinoSegments of the target, and of a drafter with its own weights. forwards: of each model.
    """

    segments: list[Any]
    forwards: list[LeanDecoder]


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
        self._specs: list[DecoderSpec] = []  # of the models, without weights, from the installation on
        self._originals: list[Callable[..., Any]] = []  # the forward passes of transformers
        self._compiled: dict[int, Compiled] = {}  # by number of threads, the present one and others during trials
        self._below: list[tuple[PreTrainedModel, Any]] = []  # models that compute here, and forwards set before
        self._has_helpers = False  # whether the kernels of helpers are of this engine
        self._memory: Callable[[], int] | None = None  # during trials

    def unsupported(self) -> str:
        """Return why the models cannot be computed this way."""
        if missing := openvino_support.unsupported(self.weights):
            return missing
        return next((reason for reason in map(self._unreadable, self._models) if reason), "")

    def install(self, thread_counts: Sequence[int], report: Report = unreported) -> str:
        """Convert the weights if that has not been done. Returns why the logits are not those of the plain engine."""
        reference = [selftest.prefill_logits(model) for model in self._models] if self._weights.as_loaded else []
        self._start(report)
        differing = (
            selftest.differ_beyond_rounding(selftest.prefill_logits(model), logits)
            for model, logits in zip(self._models, reference, strict=False)
        )
        return DIFFERENT_LOGITS if any(differing) else ""

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        """Use the converted weights, which passed the test before, and test one verify width again."""
        self._start(unreported)
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
        """Compute with this number of threads. Graphs that are in use are compiled for it, once during trials."""
        torch.set_num_threads(count)
        before, self._threads = self._threads, count
        if count == before or not self._below:
            return
        if count not in self._compiled:
            self._compile(before, count)
        self._set_forwards()
        if self._memory is None:
            self._swap_helpers()

    def nbytes(self) -> int:
        """Return the bytes of the weights while the engine is installed."""
        embeddings = {id(table): table for table in (model.get_input_embeddings() for model in self._models)}
        return self._converted_bytes() + tensor_bytes([*embeddings.values(), *self._helpers])

    def remove(self) -> None:
        """Let the models compute again by themselves, or by the engine below."""
        self._remove_forwards()
        if self._has_helpers:
            restore_linears(self._helpers)
            self._has_helpers = False
        if not self._has_room():
            self._compiled = {}

    def begin_trials(self, memory: Callable[[], int]) -> None:
        """Keep what is compiled from now on. memory: returns the bytes that are available."""
        self._memory = memory

    def end_trials(self) -> None:
        """Release what is not in use."""
        self._memory = None
        self._compiled = {self._threads: self._compiled[self._threads]} if self._below else {}
        if self._below:
            self._swap_helpers()
            self._release_weights()  # another engine may have restored them

    def is_parked(self) -> bool:
        """Whether the engine is removed and can compute again at once."""
        return self._threads in self._compiled and not self._below

    def resume(self) -> None:
        """Compute again. Helpers follow when the trials end."""
        self._set_forwards()

    def _unreadable(self, model: PreTrainedModel) -> str:
        if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
            return NOT_HERE
        spec = None if vars(model).get("forward") else read_decoder(model)  # an installed engine has read it
        return spec if isinstance(spec, str) else ""

    def _start(self, report: Report) -> None:
        specs = [cast(DecoderSpec, read_decoder(model)) for model in self._models]
        report("converting the weights for OpenVINO")
        # A drafter that consists of the first layers of the target is computed by the target's graphs.
        segments = [
            self._converted(model, spec)
            for index, (model, spec) in enumerate(zip(self._models, specs, strict=True))
            if not index or not _is_cut(spec, specs[0])
        ]
        self._specs = [spec.without_weights() for spec in specs]
        self._originals = [model.forward for model in self._models]
        self._compiled = {self._threads: self._forwards(segments)}
        self._set_forwards()
        if self._memory is None:
            self._swap_helpers()
        self._release_weights()

    def _converted(self, model: PreTrainedModel, spec: DecoderSpec) -> Any:
        from utils.engine.openvino_segments import OpenVinoSegments  # takes half a second

        blocks = self._weights.blocks if model is self._models[0] else None
        # The blocks of a file are those of the target.
        kind = "int8" if self.weights == "gguf" and not blocks else self.weights
        weights = EngineWeights(kind, blocks)
        return OpenVinoSegments(spec, weights=weights, threads=self._threads, folder=self.folder)

    def _forwards(self, segments: list[Any]) -> Compiled:
        """The forward pass of each model over these segments, the last of which are those of the drafter."""
        forwards: list[LeanDecoder] = []
        for model, spec, own in zip(self._models, self._specs, (segments[0], segments[-1]), strict=False):
            # transformers' forward has only the weights as they were loaded.
            original = self._originals[len(forwards)] if self._weights.as_loaded else None
            forwards.append(LeanDecoder(spec, own, model.config, original=original))
        return Compiled(segments, forwards)

    def _compile(self, before: int, count: int) -> None:
        """Compile the graphs for another number of threads, in place of the present ones unless there is room."""
        segments = self._compiled[before].segments
        if self._has_room():
            self._compiled[count] = self._forwards([part.with_threads(count) for part in segments])
            return
        for part in segments:
            part.set_threads(count)
        self._compiled = {count: self._compiled[before]}

    def _set_forwards(self) -> None:
        self._below = self._below or [(model, vars(model).get("forward")) for model in self._models]
        for model, forward in zip(self._models, self._compiled[self._threads].forwards, strict=True):
            model.forward = cast(Any, forward)

    def _remove_forwards(self) -> None:
        for model, own in self._below:
            del model.forward
            if own is not None:
                model.forward = own
        self._below = []

    def _has_room(self) -> bool:
        """Whether another set of compiled graphs may be kept."""
        return self._memory is not None and self._memory() > SPARE * self._converted_bytes()

    def _release_weights(self) -> None:
        release_weights(self._models, self.folder)
        release_memory()  # weights that another engine had restored: otherwise the allocator keeps their memory

    def _converted_bytes(self) -> int:
        compiled = next(iter(self._compiled.values()), None)
        return sum(int(segments.nbytes()) for segments in compiled.segments) if compiled else 0

    def _swap_helpers(self) -> None:
        from utils.engine.openvino_kernel import OpenVinoKernel

        def build(weight: Tensor, bias: Tensor | None) -> Kernel:
            # Drafts are verified, so rounding a helper's weights changes speed, not texts.
            exact = self.weights in ("float32", "bfloat16")
            return OpenVinoKernel(weight if exact else round_int8(weight.float()), bias, threads=self._threads)

        restore_linears(self._helpers)
        self._has_helpers = True
        swap_linears(self._helpers, by_weight(build))


def _is_cut(spec: DecoderSpec, target: DecoderSpec) -> bool:
    """Whether a decoder consists of the first layers of the target, with the same weights."""
    if len(spec.layers) > len(target.layers) or spec.head.weight is not target.head.weight:
        return False
    pairs = zip(spec.layers, target.layers, strict=False)
    return all(own.down.weight is other.down.weight for own, other in pairs)
