"""The self-test of an engine: are its logits those of the loaded weights, and the same at every verify width?

It runs on this machine with the loaded weights. The first layers are compared with transformers' own forward pass. The
first layer and the output head are tested at every verify width, whole models at a few widths and in one prefill.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.decode.engine_forward import MAX_WIDTH
from utils.decode.layer_cut import chosen_layers, first_layers, layer_kinds, shell
from utils.decode.logit_drift import LogitDrift, logits_by_width, max_rounding
from utils.decode.model_info import context_length, vocabulary_size
from utils.decode.model_session import ModelSession
from utils.engine.forward_timing import sample_ids
from utils.engine.layer_engine import Report, unreported
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError

PREFIX = 13  # cached tokens before the tested positions
LONG_PREFIX = MAX_WIDTH + 3  # more than a verify pass has rows, so that it is a prefill
POSITIONS = 12  # tested positions
WIDTHS = (2, 3, 5, 9, POSITIONS)  # tested verify widths of a whole model
EVERY_WIDTH = range(2, MAX_WIDTH + 1)
TILED_WIDTHS = (*range(2, 27), 31, 32, 33, 48, MAX_WIDTH)  # these use every tile of compiled products
RECHECKED_WIDTHS = (2, 3, 5)  # one of them at later starts
START_POSITIONS, START_WIDTHS = 5, (5,)  # of a whole model at a start
COMPARED_LAYERS = 2
MAX_DEVIATION = 0.1  # of rounded weights: the norm of the difference of logits over that of the logits
DIFFERENT_LOGITS = "its logits differ from those of the plain engine"


def width_dependence(
    model: PreTrainedModel,
    thread_count: int,
    *,
    widths: Sequence[int] = EVERY_WIDTH,
    complete: bool = False,
    report: Report = unreported,
) -> str:
    """Describe the first logits that differ from those of single decode steps. Empty if there are none.

    widths: at which the first layer and the output head are tested, in ascending order. complete: test them at every
    width, and whole models at more positions and widths.
    """
    widths = EVERY_WIDTH if complete and widths else widths
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count)
    try:
        for part, positions, tested in _tested_parts(model, widths, complete):
            context = sample_context(model, PREFIX + positions)
            prefix = min(PREFIX, len(context) // 2)
            session, count = _session_after(part, context[:prefix]), len(context) - prefix
            alone = logits_by_width(session, context, count, 1)  # (positions, V), by decode steps
            threads = f"{thread_count} thread{'s' if thread_count > 1 else ''}"
            for name, logits in _wide_passes(session, context, count, tested):
                report(f"testing the engine: {name}, {threads}")
                if not torch.equal(logits, alone[: len(logits)]):
                    return f"{name} differs from single decode steps ({threads})"
            report(f"testing the engine: a prefill, {threads}")
            if not torch.equal(ModelSession(part).feed(context, keep=count), alone):
                return f"a prefill differs from single decode steps ({threads})"
    finally:
        torch.set_num_threads(before)
    return ""


def one_width_differs(model: PreTrainedModel, width: int) -> str:
    """Describe a verify pass of this width if its logits differ from those of single decode steps."""
    context = sample_context(model, PREFIX + width)
    prefix = max(1, len(context) - width)
    session, count = _session_after(model, context[:prefix]), len(context) - prefix
    alone, wide = (logits_by_width(session, context, count, size) for size in (1, width))
    return "" if torch.equal(wide, alone) else f"a verify pass of {width} tokens differs from single decode steps"


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits of a model's first layers with the loaded weights, computed by transformers before an engine is used.

    depth: the number of layers; None for a model that cannot be cut, of which all are compared. logits: (POSITIONS, V).
    exact: whether an engine must have these logits up to rounding; weights that it rounds are rounded here as well, but
    not its inputs.
    """

    depth: int | None
    logits: Tensor
    exact: bool

    @classmethod
    def of(cls, model: PreTrainedModel, weights: EngineWeights) -> "Reference":
        """The model must be computed by its plain layers."""
        try:
            depth = min(COMPARED_LAYERS, len(layer_kinds(model)))
            part = chosen_layers(model, range(depth))
        except UserError:
            depth, part = None, shell(model)
        read_weights(part, weights)
        return cls(depth, sample_logits(part), weights.as_loaded)

    def difference(self, model: PreTrainedModel) -> str:
        """Describe how logits of the same model differ now. Empty if they do not."""
        part = model if self.depth is None else chosen_layers(model, range(self.depth))
        return deviation(part, self.logits, exact=self.exact)


def deviation(part: PreTrainedModel, reference: Tensor, *, exact: bool) -> str:
    """Describe how logits differ from those of a reference (POSITIONS, V). Empty if they do not."""
    logits = sample_logits(part)
    if exact:
        return DIFFERENT_LOGITS if differ_beyond_rounding(logits, reference) else ""
    share = float((logits.float() - reference).norm() / reference.norm())
    return "" if share <= MAX_DEVIATION else f"{DIFFERENT_LOGITS} with the same rounded weights"


def sample_logits(model: PreTrainedModel) -> Tensor:
    """Return logits (POSITIONS, V) after a prefill of a sample text, to compare two engines."""
    return prefill_logits(model, LONG_PREFIX)


def prefill_logits(model: PreTrainedModel, prefix: int = PREFIX) -> Tensor:
    """Return logits (POSITIONS, V) of a sample text behind `prefix` tokens."""
    session = ModelSession(model, rewinds=False)
    context = sample_context(model, prefix + POSITIONS)
    return session.feed(context, keep=min(POSITIONS, len(context)))


def differ_beyond_rounding(logits: Tensor, reference: Tensor) -> bool:
    """Whether logits (k, V) of two engines differ by more than rounding can explain. NaN counts as a difference."""
    return not LogitDrift.of([logits, reference]).difference <= max_rounding(reference)


def sample_context(model: PreTrainedModel, length: int) -> list[int]:
    """Return token ids spread over the vocabulary, at most as many as the model's context takes."""
    limit = context_length(model)
    return sample_ids(min(length, limit or length), vocabulary_size(model))


def read_weights(part: PreTrainedModel, weights: EngineWeights) -> None:
    """Give a model that shares its weights with another one the values that an engine computes, in memory."""
    head = part.get_output_embeddings()
    for name, layer in part.named_modules():
        if type(layer) is nn.Linear:
            rounded = weights.rounded(name, layer.weight, is_head=layer is head)
            layer._parameters["weight"] = nn.Parameter(rounded, requires_grad=False)
    vars(part)["_in_files"] = False


def _tested_parts(
    model: PreTrainedModel, widths: Sequence[int], complete: bool
) -> Iterator[tuple[PreTrainedModel, int, Sequence[int]]]:
    """Yield each model to test with the number of its tested positions and the widths."""
    if widths:
        try:
            # The other layers usually have the same shapes, so most widths are tested on one of them only.
            yield first_layers(model, 1), widths[-1], widths
        except UserError:  # it cannot be cut, so all of it is tested at these widths
            yield model, widths[-1], widths
            return
    yield model, *((POSITIONS, WIDTHS) if complete else (START_POSITIONS, START_WIDTHS))


def _wide_passes(
    session: ModelSession, context: list[int], count: int, widths: Sequence[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and the logits of verify passes of each width over the last tokens, which the session lacks."""
    prefix = len(context) - count
    for width in (width for width in widths if width <= count):
        if widths[-1] > POSITIONS:  # one pass for each of many widths, otherwise passes over all positions
            yield f"a verify pass of {width} tokens", session.fork().feed(context[: prefix + width], keep=width)
        else:
            yield f"a verify pass of {width} tokens", logits_by_width(session, context, count, width)


def _session_after(part: PreTrainedModel, prefix: list[int]) -> ModelSession:
    session = ModelSession(part)
    session.feed(prefix, keep=1)
    return session
