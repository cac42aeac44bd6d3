"""The invariant engine: linear layers and attention whose rows have the same bits at every verify width.

A verify pass then gives exactly the logits of single decode steps, so greedy texts of all strategies are equal bit for
bit. On a CPU in float32 it is faster than the plain layers as well.
"""

from collections.abc import Sequence
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
from utils.engine.kernels import KnownLayers, blocked_builder, compiled_builder
from utils.engine.layer_engine import BIT_IDENTICAL, Report, unreported
from utils.engine.lean_decoder import LeanDecoder
from utils.engine.module_swap import GroupBuilder, restore_linears, swap_linears
from utils.engine.read_decoder import read_decoder
from utils.engine.stored_weights import release
from utils.engine.weight_format import EngineWeights, decoder_bytes, freed_bytes, tensor_bytes, weight_format

UNKNOWN_WINDOW = "its attention does not report its sliding window"


class InvariantEngine:
    """Row-invariant layers in the models of a pair.

    models: the target, then the drafter if there is one. helpers: modules that are computed the same way, such as a
    drafter that reads hidden states, whose drafts are verified in any case. weights: the format of linear weights;
    another than the loaded one cannot be undone.
    """

    promise = BIT_IDENTICAL

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        self._models, self._helpers, self._format = list(models), list(helpers), weights
        self._plain_attention = [model.config._attn_implementation for model in self._models]
        self._installed = False
        self.has_own_forward = True
        self.weights = weight_format(self._models[0]) if weights.as_loaded else weights.format

    def unsupported(self) -> str:
        """Return why the models cannot be computed this way."""
        reasons = (_unsupported(model) or self._format_problem(model) for model in self._models)
        return next(filter(None, reasons), "")

    def _format_problem(self, model: PreTrainedModel) -> str:
        if self._format.as_loaded:
            return ""
        if model.device.type != "cpu" or weight_format(model) != "float32":
            return f"{self._format.format} weights are computed for models in float32 on a CPU only"
        return ""

    def need(self) -> int:
        """Return the bytes of packed weights, less those that packing frees."""
        return max(0, decoder_bytes(self._models, self._format) - freed_bytes(self._models))

    def install(self, report: Report = unreported) -> str:
        """Replace linear layers and attention."""
        release(self._models)
        # Set before the first layer is replaced, so that `remove` also undoes an installation that was cut short.
        self._installed = True
        specs = [_spec_of(model) if self.has_own_forward else "" for model in self._models]
        swap_linears([*self._models, *self._helpers], self._kernel_builder(), report)
        for model, spec in zip(self._models, specs, strict=True):
            # For models that cannot be read, and for arguments that a lean forward does not take.
            model.set_attn_implementation(attention.NAME)
            if isinstance(spec, DecoderSpec):
                products, head = products_of(model, spec)
                model.forward = LeanDecoder(spec, products, head, config=model.config, original=model.forward)
            elif any(empty_cache(model).is_sliding) and not _reports_windows(model):
                return UNKNOWN_WINDOW
        if _is_compiled(self._models[0]):
            self._compile_drafters()
        return ""

    def _compile_drafters(self) -> None:
        """Give drafters that can be described a program, if it computes what their modules compute."""
        for helper in self._helpers:
            if getattr(helper, "draft_spec", lambda: None)() is not None:
                compiled = CompiledDrafter(helper)
                if compiled.agrees():
                    cast(Any, helper).compiled = compiled

    def self_test(self, thread_count: int, report: Report = unreported, *, complete: bool = False) -> str:
        """Test whole models, and the first layer of each model with its own weights at every width."""
        every = selftest.TILED_WIDTHS if _is_compiled(self._models[0]) else selftest.EVERY_WIDTH
        tests = (
            # The layers of a drafter that was cut out of the target are tested with the target.
            selftest.width_dependence(
                model,
                thread_count,
                widths=every if index == 0 or not self._shares_weights_with_target(model) else (),
                complete=complete,
                report=report,
            )
            for index, model in enumerate(self._models)
        )
        return next(filter(None, tests), "")

    def set_threads(self, count: int) -> None:
        """Compute with this number of threads."""
        torch.set_num_threads(count)

    def nbytes(self) -> int:
        """Return the bytes of the weights, of packed ones as well."""
        return tensor_bytes([*self._models, *self._helpers])

    def remove(self) -> None:
        """Put nn.Linear layers and the original attention back."""
        if self._installed:
            for model in self._models:
                vars(model).pop("forward", None)
            for helper in self._helpers:
                vars(helper).pop("compiled", None)
            restore_linears([*self._models, *self._helpers])
            for model, name in zip(self._models, self._plain_attention, strict=True):
                model.set_attn_implementation(name)
            release(self._models)
            self._installed = False

    def _shares_weights_with_target(self, model: PreTrainedModel) -> bool:
        # A layer cut shares its modules with the target; a drafter that was loaded does not.
        return model.get_input_embeddings().weight is self._models[0].get_input_embeddings().weight

    def _kernel_builder(self) -> GroupBuilder:
        if not _is_compiled(self._models[0]):
            return blocked_builder
        return compiled_builder(self._format, KnownLayers.of(self._models))


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
