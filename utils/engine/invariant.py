"""The invariant engine: linear layers and attention whose rows have the same bits at every verify width.

A verify pass then gives exactly the logits of single decode steps, so greedy texts of all strategies are equal bit for
bit. On a CPU in float32 it is faster than the plain layers as well.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.decode.engine_forward import engine_forward
from utils.decode.model_info import is_spread
from utils.decode.sliding_window import empty_cache
from utils.engine import attention, selftest
from utils.engine.block_kernels import UNPACKED_PREFILL_SIZES, KnownLayers, format_builder
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.kernels import PREFILL_SIZES, BlockedKernel, packed_kernel_builder
from utils.engine.layer_engine import BIT_IDENTICAL, Report, unreported
from utils.engine.lean_decoder import LeanDecoder
from utils.engine.module_swap import GroupBuilder, by_weight, restore_linears, swap_linears
from utils.engine.read_decoder import read_decoder
from utils.engine.torch_segments import TorchSegments, products_of
from utils.engine.weight_format import EngineWeights
from utils.engine.weight_memory import tensor_bytes, weight_format

DIFFERENT_LOGITS = "its logits differ from those of the plain engine"
UNKNOWN_WINDOW = "its attention does not report its sliding window"


class InvariantEngine:
    """Row-invariant layers in the models of a pair.

    models: the target, then the drafter if there is one. helpers: modules that are computed the same way but not
    tested, such as a draft head, whose drafts are verified in any case. weights: the format of linear weights; another
    than the loaded one cannot be undone.
    """

    promise = BIT_IDENTICAL

    def __init__(self, models: Sequence[PreTrainedModel], helpers: Sequence[nn.Module], weights: EngineWeights) -> None:
        self._models, self._helpers, self._format = list(models), list(helpers), weights
        self._plain_attention = [model.config._attn_implementation for model in self._models]
        self._specs: list[DecoderSpec | str] = []  # while installed; a clause says why a model cannot be read
        self._installed = False
        self.layouts: dict[str, int] = {}
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
        lacks = self._format.format == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return "this processor has no bfloat16 instructions for PyTorch" if lacks else ""

    def install(self, thread_counts: Sequence[int], report: Report = unreported) -> str:
        """Replace linear layers and attention. Returns why the logits are not those of the plain layers."""
        # Rounded weights give different logits, so there is no reference to compare with.
        known = self._models if self._format.as_loaded else []
        reference = [selftest.prefill_logits(model) for model in known]
        self.layouts = {}

        def attempt() -> str:
            self._replace(thread_counts, report)
            return self._compare(reference)

        return _reason(attempt)

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        """Replace linear layers and attention in layouts that were found before, and test one verify width."""
        self.layouts = dict(layouts)

        def attempt() -> str:
            self._replace([torch.get_num_threads()], unreported)
            return self._test_one_width(width)

        return _reason(attempt)

    def self_test(self, thread_count: int, report: Report = unreported) -> str:
        """Test whole models, and the first layer of each model with its own weights at every width."""
        tests = (
            # The layers of a drafter that was cut out of the target are tested with the target.
            selftest.width_dependence(
                model,
                [thread_count],
                every_width=index == 0 or not self._shares_weights_with_target(model),
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
            restore_linears([*self._models, *self._helpers])
            for model, name in zip(self._models, self._plain_attention, strict=True):
                model.set_attn_implementation(name)
            self._installed = False

    def _replace(self, thread_counts: Sequence[int], report: Report) -> None:
        # Set before the first layer is replaced, so that `remove` also undoes an installation that was cut short.
        self._installed = True
        self._specs = [_spec_of(model) for model in self._models]
        swap_linears([*self._models, *self._helpers], self._kernel_builder(thread_counts), report)
        for model, spec in zip(self._models, self._specs, strict=True):
            # For models that cannot be read, and for arguments that a lean forward does not take.
            model.set_attn_implementation(attention.NAME)
            if isinstance(spec, DecoderSpec):
                sizes = PREFILL_SIZES if self._format.as_loaded else UNPACKED_PREFILL_SIZES
                segments = TorchSegments(spec, *products_of(model, spec), prefill_rows=sizes)
                model.forward = LeanDecoder(spec, segments, model.config, original=model.forward)

    def _test_one_width(self, width: int) -> str:
        others = [model for model in self._models[1:] if not self._shares_weights_with_target(model)]
        tests = (selftest.one_width_differs(model, width) for model in (self._models[0], *others))
        return next(filter(None, tests), "")

    def _compare(self, reference: list[Tensor]) -> str:
        """Compare with the logits of the plain layers, if there are any."""
        for index, model in enumerate(self._models):
            attention.seen_sliding_windows.clear()
            if reference and self._logits_differ(model, reference[index]):
                return DIFFERENT_LOGITS
            # A model whose layers do not pass `sliding_window` on would attend to the whole context instead. The sample
            # text may be too short for that to change its logits.
            if (
                not engine_forward(model)
                and any(empty_cache(model).is_sliding)
                and not attention.seen_sliding_windows - {None}
            ):
                return UNKNOWN_WINDOW
        return ""

    def _logits_differ(self, model: PreTrainedModel, reference: Tensor) -> bool:
        """Whether the logits differ from those of the plain layers. A lean forward that differs is given up."""
        if not selftest.differ_beyond_rounding(selftest.prefill_logits(model), reference):
            return False
        if vars(model).pop("forward", None) is None:
            return True
        return selftest.differ_beyond_rounding(selftest.prefill_logits(model), reference)

    def _shares_weights_with_target(self, model: PreTrainedModel) -> bool:
        # A layer cut shares its modules with the target; a drafter that was loaded does not.
        return model.get_input_embeddings().weight is self._models[0].get_input_embeddings().weight

    def _kernel_builder(self, thread_counts: Sequence[int]) -> GroupBuilder:
        target = self._models[0]
        # PackedKernel is for float32 on a CPU. Padding to full blocks works everywhere.
        if target.device.type != "cpu" or target.dtype != torch.float32:
            return by_weight(BlockedKernel)
        if self._format.as_loaded:
            return by_weight(packed_kernel_builder(thread_counts, self.layouts))
        return format_builder(self._format, thread_counts, self.layouts, layers=KnownLayers.of(self._models))


def _spec_of(model: PreTrainedModel) -> DecoderSpec | str:
    """What the model computes, without its matrices, so that packing them frees them."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return "the lean forward computes float32 on CPUs only"
    spec = read_decoder(model)
    return spec.without_weights() if isinstance(spec, DecoderSpec) else spec


def _reason(attempt: Callable[[], str]) -> str:
    """The reason that an attempt returns, or the error that it raised."""
    try:
        return attempt()
    # A model's own code may not accept the replaced layers. That is a reason to stay plain, not a crash.
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return str(error).partition("\n")[0] or type(error).__name__


def _unsupported(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "tp_size", None):
        return "its layers are split among several processes"
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
