"""The self-test of an engine: are a model's logits bit for bit the same at every verify width?

It runs on this machine with the loaded weights. It tests the first layer and the output head at every width up to the
largest one, then the whole model at a few widths and in one prefill, each with every number of threads that it is
given.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from utils.decode.engine_forward import MAX_WIDTH
from utils.decode.layer_cut import first_layers
from utils.decode.logit_drift import LogitDrift, logits_by_width, max_rounding
from utils.decode.model_info import context_length, vocabulary_size
from utils.decode.model_session import ModelSession
from utils.engine.forward_timing import sample_ids
from utils.engine.layer_engine import Report, unreported
from utils.errors import UserError

PREFIX = 13  # cached tokens before the tested positions
POSITIONS = 12  # tested positions of the whole model
WIDTHS = (2, 3, 5, 9, POSITIONS)  # tested verify widths of the whole model


def width_dependence(
    model: PreTrainedModel, thread_counts: Sequence[int], *, every_width: bool, report: Report = unreported
) -> str:
    """Describe the first logits that differ from those of single decode steps. Empty if there are none.

    every_width: also test the first layer and the output head at every width.
    """
    before = torch.get_num_threads()
    try:
        for part, positions in _tested_parts(model, every_width):
            context = sample_context(model, PREFIX + positions)
            prefix = min(PREFIX, len(context) // 2)
            for count in thread_counts:
                torch.set_num_threads(count)
                # (positions, V), by decode steps
                alone = logits_by_width(_session_after(part, context[:prefix]), context, len(context) - prefix, 1)
                threads = f"{count} thread{'s' if count > 1 else ''}"
                for name, logits in _wide_passes(part, context, prefix, every_width=positions == MAX_WIDTH):
                    report(f"testing the engine: {name}, {threads}")
                    if not torch.equal(logits, alone[: len(logits)]):
                        return f"{name} differs from single decode steps ({threads})"
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


def prefill_logits(model: PreTrainedModel) -> Tensor:
    """Return logits (POSITIONS, V) of a sample text, to compare two engines."""
    session = ModelSession(model, rewinds=False)
    return session.feed(sample_context(model, PREFIX + POSITIONS), keep=POSITIONS)


def differ_beyond_rounding(logits: Tensor, reference: Tensor) -> bool:
    """Whether logits (k, V) of two engines differ by more than rounding can explain. NaN counts as a difference."""
    return not LogitDrift.of([logits, reference]).difference <= max_rounding(reference)


def sample_context(model: PreTrainedModel, length: int) -> list[int]:
    """Return token ids spread over the vocabulary, at most as many as the model's context takes."""
    limit = context_length(model)
    return sample_ids(min(length, limit or length), vocabulary_size(model))


def _tested_parts(model: PreTrainedModel, every_width: bool) -> Iterator[tuple[PreTrainedModel, int]]:
    """Yield each model to test with the number of its tested positions."""
    if every_width:
        try:
            # The other layers usually have the same shapes, so every width is tested on one of them only.
            yield first_layers(model, 1), MAX_WIDTH
        except UserError:  # it cannot be cut, so all of it is tested at every width
            yield model, MAX_WIDTH
            return
    yield model, POSITIONS


def _wide_passes(
    part: PreTrainedModel, context: list[int], prefix: int, *, every_width: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and the logits of the positions after the prefix:

    verify passes of each tested width, and one prefill.
    """
    session, count = _session_after(part, context[:prefix]), len(context) - prefix
    if every_width:
        for width in range(2, count + 1):
            yield f"a verify pass of {width} tokens", session.fork().feed(context[: prefix + width], keep=width)
    else:
        for width in WIDTHS:
            yield f"a verify pass of {width} tokens", logits_by_width(session, context, count, width)
    yield "a prefill", ModelSession(part).feed(context, keep=count)


def _session_after(part: PreTrainedModel, prefix: list[int]) -> ModelSession:
    session = ModelSession(part)
    session.feed(prefix, keep=1)
    return session
