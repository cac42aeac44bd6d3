"""The self-test of an engine: are its logits those of the loaded weights, and the same at every verify width?

It runs on this machine with the loaded weights. The first layers are compared with transformers' own forward pass. The
first layer, with the first outputs of the head, is tested at every verify width, whole models at a few widths and in
one prefill. If all of that has passed at an earlier start, a slice of each model is compared and tested again.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from utils.decode.engine_forward import MAX_WIDTH, engine_forward, in_prefill
from utils.decode.layer_cut import chosen_layers, layer_kinds, shell
from utils.decode.logit_drift import largest_difference, logits_by_width, max_rounding
from utils.decode.model_info import context_length, sample_ids, vocabulary_size
from utils.decode.model_session import ModelSession
from utils.engine.layer_engine import Report, unreported
from utils.engine.stored_weights import rows_of
from utils.engine.weight_blocks import BlockWeight
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError

PREFIX = 13  # cached tokens before the tested positions
LONG_PREFIX = MAX_WIDTH + 3  # more than a verify pass has rows, so that it is a prefill
POSITIONS = 12  # tested positions
WIDTHS = (2, 3, 5, 9, POSITIONS)  # tested verify widths of a whole model
EVERY_WIDTH = range(2, MAX_WIDTH + 1)
TILED_WIDTHS = (*range(2, 27), 31, 32, 33, 57, 58, MAX_WIDTH)  # these use every tile of compiled products
START_WIDTHS = (2, 5)  # of a whole model at its first start
LATER_WIDTHS = (2, 3, 5)  # of a slice at later starts
COMPARED_LAYERS = 2
TESTED_HEAD = 4096  # outputs of the head: tested at every width, and compared at later starts
MAX_DEVIATION = 0.1  # of logits that need not be exact: the norm of the difference over that of the logits
DRAFT_ROWS = (3, 1, 1, 2, 12)  # entries of a drafter that are added one after the other
# Of a drafter's logits, as a share of their largest difference from their mean; the second one in half precision.
DRAFT_TOLERANCE, HALF_DRAFT_TOLERANCE = 1e-3, 0.05
DIFFERENT_LOGITS = "its logits differ from those of the plain engine"


def own_models(models: Sequence[PreTrainedModel]) -> list[PreTrainedModel]:
    """Return the first model and those with weights of their own, unlike a drafter that was cut out of the first."""
    first = models[0].get_input_embeddings().weight
    return [models[0], *(model for model in models[1:] if model.get_input_embeddings().weight is not first)]


def width_dependence(
    model: PreTrainedModel,
    widths: Sequence[int],
    thread_count: int,
    *,
    complete: bool = False,
    report: Report = unreported,
) -> str:
    """Describe the first logits that differ from those of single decode steps. Empty if there are none.

    widths: at which the first layer and the first outputs of the head are tested, in ascending order. complete: test
    them at every width, with the whole head, and whole models at more positions and widths.
    """
    if widths:
        widths = EVERY_WIDTH if complete else widths
        # The other layers usually have the same shapes, so most widths are tested on one of them only.
        part = _first_layer(model, None if complete else TESTED_HEAD)
        failure = _dependence(part, widths, thread_count, report)
        if failure or part is model:  # it cannot be cut, so all of it was tested
            return failure
    return _dependence(model, WIDTHS if complete else START_WIDTHS, thread_count, report)


def slice_dependence(model: PreTrainedModel, thread_count: int, report: Report) -> str:
    """Like `width_dependence`, of the first layer and the first outputs of the head at a few widths."""
    return _dependence(_first_layer(model, TESTED_HEAD), LATER_WIDTHS, thread_count, report)


def _first_layer(model: PreTrainedModel, outputs: int | None) -> PreTrainedModel:
    """The first layer with so many outputs of the head (None: all), or the model itself if it cannot be cut."""
    try:
        return _layers(model, 1, outputs)
    except UserError:
        return model


def _layers(model: PreTrainedModel, depth: int, outputs: int | None) -> PreTrainedModel:
    """The first layers with so many outputs of the head (None: all). Raises UserError if the model cannot be cut."""
    part = chosen_layers(model, range(depth))
    if outputs is not None:
        part.generation_config = None  # its rules may name other outputs
        if (forward := engine_forward(part)) is not None:
            forward.narrow(outputs)
    return part


def _dependence(part: PreTrainedModel, widths: Sequence[int], thread_count: int, report: Report) -> str:
    """Compare the last positions of a sample text, in passes of these widths and in a prefill, with decode steps."""
    torch.set_num_threads(thread_count)
    threads = f"{thread_count} thread{'s' if thread_count > 1 else ''}"
    context = sample_context(part, PREFIX + widths[-1])
    prefix = min(PREFIX, max(len(context) // 2, len(context) - widths[-1]))
    session, count = ModelSession(part), len(context) - prefix
    session.feed(context[:prefix], keep=1)
    alone = logits_by_width(session, context, count, 1)  # (positions, V), by decode steps
    for width in (width for width in widths if width <= count):
        report(f"testing the engine: a verify pass of {width} tokens, {threads}")
        if widths is WIDTHS:  # of a complete test: passes over all positions
            logits = logits_by_width(session, context, count, width)
        else:
            logits = session.fork().feed(context[: prefix + width], keep=width)
        if not torch.equal(logits, alone[: len(logits)]):
            return f"a verify pass of {width} tokens differs from single decode steps ({threads})"
    report(f"testing the engine: a prefill, {threads}")
    if not torch.equal(ModelSession(part).feed(context, keep=count), alone):
        return f"a prefill differs from single decode steps ({threads})"
    return ""


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits of a model's first layers with the loaded weights, computed by transformers before an engine is used.

    depth: the number of layers; None for a model that cannot be cut, of which all are compared. logits: (POSITIONS, V),
    or of the first `outputs`. exact: whether an engine must have these logits up to rounding. Otherwise it rounds the
    inputs of its weights, which are rounded here as well, or computes in float32 what the model rounds to 16 bits.
    prefix: tokens before the compared positions.
    """

    model: PreTrainedModel
    depth: int | None
    logits: Tensor
    exact: bool
    prefix: int
    outputs: int | None

    @classmethod
    def of(cls, model: PreTrainedModel, weights: EngineWeights, *, passed: bool = False) -> "Reference":
        """The model must be computed by its plain layers. passed: compare less, because an earlier start did more."""
        outputs, prefix = (TESTED_HEAD, PREFIX) if passed else (None, LONG_PREFIX)
        try:
            depth = min(1 if passed else COMPARED_LAYERS, len(layer_kinds(model)))
            part = _layers(model, depth, outputs)
        except UserError:
            depth, outputs, part = None, None, shell(model)
        read_weights(part, weights, outputs=outputs)
        in_float32 = model.device.type == "cpu" and model.dtype.itemsize < 4
        return cls(model, depth, sample_logits(part, prefix), weights.as_loaded and not in_float32, prefix, outputs)

    def difference(self) -> str:
        """Describe how logits of the model differ now. Empty if they do not."""
        part = self.model if self.depth is None else _layers(self.model, self.depth, self.outputs)
        logits = sample_logits(part, self.prefix)[:, : self.logits.shape[1]]
        if self.exact:
            return DIFFERENT_LOGITS if differ_beyond_rounding(logits, self.logits) else ""
        share = float((logits.float() - self.logits).norm() / self.logits.norm())
        return "" if share <= MAX_DEVIATION else DIFFERENT_LOGITS


def compile_drafters(helpers: Iterable[Any], compiled: Callable[[Any], Any]) -> None:
    """Give drafters that can be described what computes their entries, if that has the logits of their modules."""
    for helper in helpers:
        if getattr(helper, "draft_spec", lambda: None)() is not None:
            with suppress(RuntimeError):  # an operation that a GPU or a version of PyTorch does not support
                own = compiled(helper)
                if drafts_like_modules(own, helper):
                    helper.compiled = own


@torch.no_grad()
def drafts_like_modules(compiled: Any, drafter: Any) -> bool:
    """Whether `compiled` adds entries to a drafter with the logits of its modules, up to rounding. The drafter must be
    computed by its modules.
    """
    generator, weight = torch.Generator().manual_seed(0), drafter.embed_tokens.weight
    tolerance = DRAFT_TOLERANCE if weight.dtype in (torch.float32, torch.float64) else HALF_DRAFT_TOLERANCE
    own, plain, first = compiled.new_cache(), drafter.new_cache(), 0
    own = drafter.new_cache() if own is None else own
    for count in DRAFT_ROWS:
        states = torch.randn(count, weight.shape[1], generator=generator).to(weight)
        tokens = torch.randint(len(weight), (count,), generator=generator).to(weight.device)
        found = compiled(states, tokens, first, own)[1].float()
        positions = torch.arange(first, first + count, device=weight.device)[None]
        state = drafter.next_states(states[None], tokens[None], positions, plain)[0, -1:]
        expected = drafter.drafted_logits(state).float()
        scale = float((expected - expected.mean()).abs().max())
        if not float((found - expected).abs().max()) <= tolerance * scale:  # NaN as well
            return False
        first += count
    return True


def sample_logits(model: PreTrainedModel, prefix: int = LONG_PREFIX) -> Tensor:
    """Return logits (POSITIONS, V) of a sample text behind `prefix` tokens, to compare two engines."""
    session = ModelSession(model, rewinds=False)
    context = sample_context(model, prefix + POSITIONS)
    return session.feed(context, keep=min(POSITIONS, len(context)))


def first_logits(part: PreTrainedModel) -> Tensor:
    """Return logits of a sample text for the first outputs of the head, the only ones that the model has afterwards."""
    part.generation_config = None  # its rules may name other outputs
    read_weights(part, EngineWeights(), outputs=TESTED_HEAD)
    return sample_logits(part, PREFIX)


def differ_beyond_rounding(logits: Tensor, reference: Tensor) -> bool:
    """Whether logits (k, V) of two engines differ by more than rounding can explain. NaN counts as a difference."""
    return not largest_difference(logits, reference) <= max_rounding(reference)


def sample_context(model: PreTrainedModel, length: int) -> list[int]:
    """Return token ids spread over the vocabulary, at most as many as the model's context takes."""
    limit = context_length(model)
    return sample_ids(min(length, limit or length), vocabulary_size(model))


def read_weights(part: PreTrainedModel, weights: EngineWeights, *, outputs: int | None) -> None:
    """Give a model that shares its weights with another one the values that an engine computes, in memory.

    outputs: of the output head that are kept, the first ones; None for all.
    """
    head = part.get_output_embeddings()
    for name, layer in part.named_modules():
        if type(layer) is nn.Linear:
            if layer is head:
                layer.forward = _HeadInPieces(name, layer, weights, outputs)
                continue
            rounded = weights.rounded(name, layer.weight, is_head=False)
            layer._parameters["weight"] = nn.Parameter(rounded, requires_grad=False)
    vars(part)["_in_files"] = False


class _HeadInPieces:
    """The forward pass of an output head, or of its first outputs, that unpacks some rows at a time: in float32 the
    head of a large vocabulary may need more memory than all weights in their final form.
    """

    def __init__(self, name: str, layer: nn.Linear, weights: EngineWeights, outputs: int | None) -> None:
        weight = layer.weight
        if outputs is not None and len(weight) > outputs:
            name, weight = f"{name}[0:{outputs}]", rows_of(weight, slice(0, outputs))
        self._form, self._dtype = weights.form(name, weight, is_head=True), weight.dtype
        self._bias = None if layer.bias is None else layer.bias.detach()[: len(weight)]

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., outputs), or (..., 0) in a prefill, whose logits are not read."""
        if in_prefill():
            return x[..., :0]
        form, pieces = self._form, []
        for start in range(0, form.shape[0], TESTED_HEAD):
            end = min(start + TESTED_HEAD, form.shape[0])
            rows = form.rows(start, end).dense() if isinstance(form, BlockWeight) else form[start:end]
            bias = None if self._bias is None else self._bias[start:end]
            pieces.append(linear(x, rows.to(self._dtype), bias))
        return torch.cat(pieces, dim=-1)
