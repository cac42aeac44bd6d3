"""The invariant engine: linear layers and attention whose rows have the same bits at every verify width.

A verify pass then gives exactly the logits of single decode steps, so greedy texts of all strategies are equal bit for
bit. On a CPU in float32 it is faster than the plain layers as well.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.decode.model_info import is_spread
from utils.decode.sliding_window import empty_cache
from utils.engine import attention, selftest
from utils.engine.compiled_decoder import products_of
from utils.engine.compiled_drafter import CompiledDrafter
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.kernels import CompiledBuilder, blocked_builder
from utils.engine.layer_engine import BIT_IDENTICAL, Extent, PlainEngine, Report, unreported
from utils.engine.lean_decoder import LeanDecoder
from utils.engine.module_swap import restore_linears, swap_linears
from utils.engine.read_decoder import read_decoder
from utils.engine.stored_weights import release
from utils.engine.weight_format import EngineWeights, decoder_bytes, freed_bytes, weight_format

UNKNOWN_WINDOW = "its attention does not report its sliding window"


class InvariantEngine(PlainEngine):
    """Row-invariant layers in the models of a pair."""

    promise = BIT_IDENTICAL
    has_own_forward = True

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        super().__init__(models, helpers, weights)
        self._plain_attention = [model.config._attn_implementation for model in models]
        self._installed = False

    def unsupported(self) -> str:
        """Return why the models cannot be computed this way."""
        reasons = (_unsupported(model) or self._format_problem(model) for model in self._models)
        return next(filter(None, reasons), "")

    def _format_problem(self, model: PreTrainedModel) -> str:
        if self._format.as_loaded or (model.device.type == "cpu" and weight_format(model) == "float32"):
            return ""
        return f"{self._format.format} weights are computed for models in float32 on a CPU only"

    def need(self) -> int:
        """Return the bytes of packed weights, less those that packing frees."""
        return max(0, decoder_bytes(self._models, self._format) - freed_bytes(self._models))

    def install(self, report: Report = unreported) -> str:
        """Replace linear layers and attention."""
        release(self._models)
        # Set before the first layer is replaced, so that `remove` also undoes an installation that was cut short.
        self._installed = True
        specs = [_spec_of(model) if self.has_own_forward else "" for model in self._models]
        is_compiled = _is_compiled(self._models[0])
        builder = CompiledBuilder(self._format, self._models) if is_compiled else blocked_builder
        swap_linears([*self._models, *self._helpers], builder, report)
        for model, spec in zip(self._models, specs, strict=True):
            # For models that cannot be read, and for arguments that a lean forward does not take.
            model.set_attn_implementation(attention.NAME)
            if isinstance(spec, DecoderSpec):
                products, head = products_of(model, spec)
                model.forward = LeanDecoder(spec, products, head, config=model.config, original=model.forward)
            elif any(empty_cache(model).is_sliding) and not _reports_windows(model):
                return UNKNOWN_WINDOW
        if is_compiled:
            self._compile_drafters()
        return ""

    def _compile_drafters(self) -> None:
        """Give drafters that can be described a program, if it computes what their modules compute."""
        for helper in self._helpers:
            if getattr(helper, "draft_spec", lambda: None)() is not None:
                compiled = CompiledDrafter(helper)
                if compiled.agrees():
                    cast(Any, helper).compiled = compiled

    def self_test(self, thread_count: int, report: Report = unreported, extent: Extent = "first") -> str:
        """Test whole models, and the first layer of each model with its own weights at every width."""
        every = selftest.TILED_WIDTHS if _is_compiled(self._models[0]) else selftest.EVERY_WIDTH
        own, tests = selftest.own_models(self._models), list[Callable[[], str]]()
        if extent == "later":
            tests += (partial(selftest.slice_dependence, model, thread_count, report) for model in own)
        else:
            test = partial(selftest.width_dependence, complete=extent == "complete", report=report)
            # The layers of a drafter that was cut out of the target are tested with the target.
            widths = [every if any(model is other for other in own) else () for model in self._models]
            tests += (partial(test, *pair, thread_count) for pair in zip(self._models, widths, strict=True))
        return next(filter(None, (test() for test in tests)), "")

    def remove(self) -> None:
        """Put nn.Linear layers and the original attention back."""
        if self._installed:
            for model in self._models:
                if isinstance(vars(model).get("forward"), LeanDecoder):  # and no wrapper of a library
                    del model.forward
            for helper in self._helpers:
                vars(helper).pop("compiled", None)
            restore_linears([*self._models, *self._helpers])
            for model, name in zip(self._models, self._plain_attention, strict=True):
                model.set_attn_implementation(name)
            self._installed = False
        super().remove()


def _is_compiled(model: PreTrainedModel) -> bool:
    return bool(model.device.type == "cpu" and model.dtype == torch.float32)


def _spec_of(model: PreTrainedModel) -> DecoderSpec | str:
    """What the model computes, without its matrices, so that packing them frees them."""
    if not _is_compiled(model):
        return "the lean forward computes float32 on CPUs only"
    spec = read_decoder(model)
    return spec.without_weights() if isinstance(spec, DecoderSpec) else spec


def _reports_windows(model: PreTrainedModel) -> bool:
    """Whether the layers of a model pass `sliding_window` on. Otherwise row-invariant attention would attend to the
    whole context, and a sample text may be too short for that to change its logits.
    """
    attention.seen_sliding_windows.clear()
    selftest.sample_logits(model)
    return bool(attention.seen_sliding_windows - {None})


def _unsupported(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if is_spread(model):
        return "its layers are spread over several devices"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention"}:
        return "some of its layers are neither full nor sliding attention"
    # Only a model that used SDPA before is known to compute what row-invariant attention computes.
    if model.config._attn_implementation not in ("sdpa", attention.NAME):
        return f"it uses {model.config._attn_implementation} attention"
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        return "quantized layers keep their own kernels"
    return ""
