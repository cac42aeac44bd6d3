"""The self-test: are this model's logits on this machine bit for bit the same in every window?

Asked of the real weights. Its first layer and its head in windows of every width up to the widest, each row of them; then the whole
model, in windows at odd places and in one prefill; with one thread and with all.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from utils.bounds import MAX_GAMMA
from utils.decode.layer_cut import first_layers
from utils.decode.logit_drift import Spread, by_width, most_rounding
from utils.decode.model_session import ModelSession, context_length, vocabulary_size
from utils.engine.forward_timing import sample_ids
from utils.errors import UserError

WIDEST = MAX_GAMMA + 1
PREFIX = 13  # tokens before the windows
PLACES = 12  # of the whole model
WIDTHS = (2, 3, 5, 9, PLACES)  # of the whole model's windows


def same_bits(model: Any, threads: Sequence[int], *, every_width: bool) -> str | None:
    """None where all logits agree, else what differed. every_width: test the first layer and the head in every width as well."""
    before = torch.get_num_threads()
    try:
        for part, widest in _parts(model, every_width):
            context = sample_context(model, PREFIX + widest)
            prefix = min(PREFIX, len(context) // 2)
            for count in threads:
                torch.set_num_threads(count)
                alone = by_width(_begun(part, context[:prefix]), context, len(context) - prefix, 1)
                for name, logits in _windows(part, context, prefix, widest):
                    if not torch.equal(logits, alone[: len(logits)]):
                        return f"{name} differs from single steps ({count} thread{'s' if count > 1 else ''})"
    finally:
        torch.set_num_threads(before)
    return None


def prefill_logits(model: Any) -> Tensor:
    """Logits (PLACES, V) of a short text, to hold one engine's against another's."""
    session = ModelSession(model, rewinds=False)
    return session.feed(sample_context(model, PREFIX + PLACES), keep=PLACES)


def far_apart(logits: Tensor, others: Tensor) -> bool:
    """Whether two engines' logits (k, V) are further apart than rounding can explain."""
    return not Spread.of([logits, others]).difference <= most_rounding(others)


def sample_context(model: Any, length: int) -> list[int]:
    """Token ids from all over the vocabulary; fewer where the model's context is short."""
    bound = context_length(model)
    count, vocabulary = min(length, bound or length), vocabulary_size(model)
    return sample_ids(count, vocabulary)


def _parts(model: Any, every_width: bool) -> Iterator[tuple[Any, int]]:
    """What is tested, and in windows up to which width."""
    if every_width:
        try:
            yield first_layers(model, 1), WIDEST
        except UserError:  # it cannot be cut: all of it, then
            yield model, WIDEST
            return
    yield model, PLACES


def _windows(part: Any, context: list[int], prefix: int, widest: int) -> Iterator[tuple[str, Tensor]]:
    """What, and its logits behind the prefix: windows of the widths to test, and a prefill."""
    begun, count = _begun(part, context[:prefix]), len(context) - prefix
    if widest > PLACES:
        for width in range(2, count + 1):
            yield f"a window of {width}", begun.fork().feed(context[: prefix + width], keep=width)
    else:
        for width in WIDTHS:
            yield f"windows of {width}", by_width(begun, context, count, width)
    yield "a prefill", ModelSession(part).feed(context, keep=count)


def _begun(part: Any, prefix: list[int]) -> ModelSession:
    session = ModelSession(part)
    session.feed(prefix, keep=1)
    return session
