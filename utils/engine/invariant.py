"""The invariant engine: linear layers and attention whose rows have the same bits at every verify width.

A verify pass then gives exactly the logits of single decode steps, so greedy texts of all strategies are equal bit for
bit. It is faster than the plain layers as well. Models in 16 bits keep their weights, and all else is computed in
float32, more precisely than transformers does.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.decode.sliding_window import empty_cache
from utils.engine import attention, selftest
from utils.engine.compiled_decoder import products_of
from utils.engine.compiled_drafter import CompiledDrafter
from utils.engine.compiled_products import CompiledKernel
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.layer_engine import BIT_IDENTICAL, Extent, PlainEngine, Report, attention_problem, unreported
from utils.engine.lean_decoder import LeanDecoder
from utils.engine.module_swap import EngineLinear, restore_linears, swap_linears
from utils.engine.read_decoder import read_decoder
from utils.engine.stored_weights import TableRows, origin_of, release
from utils.engine.weight_blocks import BlockWeight, have_one_form
from utils.engine.weight_format import EngineWeights, decoder_bytes, freed_bytes, weight_format

SHORT_FORMATS = (torch.bfloat16, torch.float16)
FORMATS = (torch.float32, *SHORT_FORMATS)  # of models, and of weights in memory
COMPARED_ROWS = 64  # of a weight that may hold values of 16 bits
UNKNOWN_WINDOW = "its attention does not report its sliding window"


class InvariantEngine(PlainEngine):
    """Row-invariant layers in the models of a pair."""

    promise = BIT_IDENTICAL
    has_own_forward = True

    def unsupported(self) -> str:
        reasons = (packing_problem(model) or self._format_problem(model) for model in self._models)
        return next(filter(None, reasons), "")

    def _format_problem(self, model: PreTrainedModel) -> str:
        if self._format.as_loaded or weight_format(model) == "float32":
            return ""
        return f"{self._format.format} weights are computed for models in float32 only"

    def need(self) -> int:
        return max(0, decoder_bytes(self._models, self._format) - freed_bytes(self._models, self._format))

    def install(self, report: Report = unreported) -> str:
        release(self._models)
        specs = [_spec_of(model) if self.has_own_forward else None for model in self._models]
        self.has_own_forward = any(specs)
        swap_linears([*self._models, *self._helpers], self._builder(), report)
        for model, spec in zip(self._models, specs, strict=True):
            # For models that cannot be read, and for arguments that a lean forward does not take.
            model.set_attn_implementation(attention.NAME)
            if spec is not None:
                head = cast(EngineLinear, model.get_output_embeddings()).kernel
                lean = LeanDecoder(spec, products_of(model, spec), head, model)
                self._replace_forward(model, lean)
                continue
            vars(model)["_in_files"] = False  # transformers' forward pass must not read what kernels hold
            if any(empty_cache(model).is_sliding) and not _reports_windows(model):
                return UNKNOWN_WINDOW
        self.compute(self._helpers)
        return ""

    def compute(self, helpers: Sequence[nn.Module]) -> None:
        swap_linears(helpers, self._builder(), unreported)
        selftest.compile_drafters(helpers, CompiledDrafter)

    def _builder(self) -> "CompiledBuilder":
        return CompiledBuilder(self._format, self._models)

    def self_test(self, thread_count: int, report: Report = unreported, extent: Extent = "first") -> str:
        """Test whole models, and the first layer of each model with its own weights at every width."""
        own = selftest.own_models(self._models)
        if extent == "later":
            failures = (selftest.slice_dependence(model, thread_count, report) for model in own)
        else:
            test = partial(selftest.width_dependence, complete=extent == "complete", report=report)
            # The layers of a drafter that was cut out of the target are tested with the target.
            widths = [selftest.TILED_WIDTHS if any(model is other for other in own) else () for model in self._models]
            failures = (test(*pair, thread_count) for pair in zip(self._models, widths, strict=True))
        return next(filter(None, failures), "")

    def remove(self) -> None:
        restore_linears([*self._models, *self._helpers])
        for model, name in zip(self._models, self._attention, strict=True):
            model.set_attn_implementation(name)
        super().remove()


def _spec_of(model: PreTrainedModel) -> DecoderSpec | None:
    """What the model computes, without its matrices, so that packing them frees them. None if it cannot be read."""
    spec = read_decoder(model)
    return None if isinstance(spec, str) else spec.without_weights()


def _reports_windows(model: PreTrainedModel) -> bool:
    """Whether the layers of a model pass `sliding_window` on. Otherwise row-invariant attention would attend to the
    whole context, and a sample text may be too short for that to change its logits.
    """
    attention.seen_sliding_windows.clear()
    selftest.sample_logits(model)
    return bool(attention.seen_sliding_windows - {None})


def packing_problem(model: PreTrainedModel) -> str:
    """Return why this engine does not support a model, whatever the format of its weights."""
    if problem := attention_problem(model, "cpu"):
        return problem
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f"its layers are of the types {', '.join(sorted(kinds))}"
    # Only a model that used SDPA before is known to compute what row-invariant attention computes.
    if model.config._attn_implementation not in ("sdpa", attention.NAME):
        return f"it uses {model.config._attn_implementation} attention"
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        return "quantized layers keep their own kernels"
    return "" if model.dtype in FORMATS else f"it is in {weight_format(model)}"


class CompiledBuilder:
    """Builds one compiled kernel for layers with the same input, in the format of `weights`, or one for each if their
    forms differ. float32 weights whose values fit into 16 bits are held in 16 bits, as in most files.

    models: the target first. A drafter's own layers have the format of drafters. Layers of no model belong to drafters
    that read hidden states, and have no name.
    """

    def __init__(self, weights: EngineWeights, models: Sequence[PreTrainedModel]) -> None:
        self._others = weights.for_draft_head()
        self._known = {
            id(part): (name, weights if model is models[0] else weights.for_drafter())
            for model in models
            for name, part in model.named_modules()
        }
        heads = (model.get_output_embeddings() for model in models)
        # The weight of a layer that an engine has replaced would be unpacked first.
        self._heads = {id(head.weight) for head in heads if isinstance(head, nn.Linear)}

    def __call__(self, layers: Sequence[nn.Linear]) -> list[CompiledKernel]:
        if (kernel := self._joined(layers)) is not None:
            return [kernel]
        forms = [self._form(layer) for layer in layers]
        if have_one_form(forms):
            bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
            return [CompiledKernel(forms, bias)]
        return [CompiledKernel([form], layer.bias) for form, layer in zip(forms, layers, strict=True)]

    def _joined(self, layers: Sequence[nn.Linear]) -> CompiledKernel | None:
        """The kernel of an output head that an embedding shares already."""
        (_, weights), rows = self._of(layers[0]), origin_of(layers[0].weight)
        is_same = weights.as_loaded and layers[0].bias is None and len(layers) == 1
        return rows.kernel if is_same and isinstance(rows, TableRows) else None

    def _of(self, layer: nn.Linear) -> tuple[str, EngineWeights]:
        """The name of a layer and its format."""
        return self._known.get(id(layer), ("", self._others))

    def _form(self, layer: nn.Linear) -> Tensor | BlockWeight:
        name, weights = self._of(layer)
        form = weights.form(name, layer.weight, is_head=id(layer.weight) in self._heads)
        return form if isinstance(form, BlockWeight) else _shortened(form)


def _shortened(form: Tensor) -> Tensor:
    """A float32 weight in a format of 16 bits if that holds the same values."""
    for short in SHORT_FORMATS if form.dtype == torch.float32 else ():
        # A few rows at a time, so that what is computed stays in the processor's cache. Most differ in the first.
        if all(torch.equal(rows.to(short).float(), rows) for rows in form.split(COMPARED_ROWS)):
            return form.to(short)
    return form
