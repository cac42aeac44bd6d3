"""Recurrent and hybrid caches: a state cannot be cropped, so a rewind goes back to a copy, and what was accepted is computed once more.

Whether that is right is up to the model's class. Some compute several tokens behind a state as if there were none, and say nothing; some
keep their state where nobody can copy it. So it is tried, once per model, on its own weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from utils.decode.kv_cache import GrowingLayer, growing_cache
from utils.decode.logit_drift import SHARE, Spread, by_width, most_rounding
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.decode.model_session import ModelSession

PREFIX, TRIED = 4, 24  # tokens before what is tried, and with it
WIDTHS = (2, 3)


class Fitness(Enum):
    """What a model's cache is good for, and what is said where that does not do."""

    WINDOWS = ""
    STEPS = "{} computes several tokens behind its recurrent state otherwise than one by one, so drafts cannot be verified with its cache"
    NOTHING = "{} keeps its recurrent state in a form that cannot be used here"


_known: WeakKeyDictionary[Any, Fitness] = WeakKeyDictionary()


def is_recurrent(model: Any) -> bool:
    """Whether its cache holds more than keys and values."""
    return bool(getattr(model, "_is_stateful", False)) or not growing_cache(model.config).is_croppable


def check_fitness(model: Any, opened: Callable[[], ModelSession], *, windows: bool) -> None:
    """Raise UserError unless the model's cache serves steps, or with `windows` whole windows. opened: fresh sessions that do not rewind."""
    if model not in _known:
        _known[model] = _fitness(opened)
    found = _known[model]
    if found is Fitness.NOTHING or (windows and found is Fitness.STEPS):
        remedy = " or run the target alone" if found is Fitness.STEPS else ""
        raise UserError(
            f"{found.value.format(opened().name)}; turn the cache off (/cache off, use_cache=False){remedy}."
        )


def _fitness(opened: Callable[[], ModelSession]) -> Fitness:
    begun = opened()
    tokens = [(31 * place + 7) % begun.vocab_size for place in range(min(TRIED, begun.context_length or TRIED))]
    try:
        whole = opened().feed(tokens, keep=len(tokens) - PREFIX)
        begun.feed(tokens[:PREFIX], keep=1)
        steps, *windows = (by_width(begun, tokens, len(whole), width) for width in (1, *WIDTHS))
    except (AttributeError, LookupError, TypeError, ValueError):  # a cache of another make, or none that is handed out
        return Fitness.NOTHING
    # Kernels for one step and for many may differ by more than rounding, and still be the same model.
    if _apart(steps, whole) > SHARE * float(whole.amax(dim=-1).abs().max()):
        return Fitness.NOTHING
    exact = all(_apart(steps, window) <= most_rounding(steps) for window in windows)
    return Fitness.WINDOWS if exact else Fitness.STEPS


def _apart(logits: Tensor, others: Tensor) -> float:
    return Spread.of([logits, others]).difference


class Retreat:
    """The last state before drafts, for a rewind to go back to. Layers that only grow are shared with the cache, and cropped on the way
    back; all others are copied."""

    def __init__(self) -> None:
        self._kept: tuple[Any, int] | None = None  # a cache and its length
        self._fed = False  # since the last rewind

    def is_due(self, keep: int) -> bool:
        """Whether a feed that keeps so many rows brings the first drafts. A feed of one row behind a rewind brings text alone."""
        due = self._kept is None and (keep > 1 or self._fed)
        self._fed = True
        return due

    def keep(self, cache: Any, length: int) -> None:
        twin = copy.copy(cache)
        if twin is not None:
            twin.layers = [layer if type(layer) is GrowingLayer else copy.deepcopy(layer) for layer in cache.layers]
        self._kept = twin, length

    def rewound(self, cache: Any, held: int, length: int) -> tuple[Any, int]:
        """A cache of at most `length` positions, and of how many, where this one holds `held`: none of any where nothing was kept."""
        kept, known = self._kept or (None, 0)
        self._kept, self._fed = None, False
        if held <= length:
            return cache, held
        if kept is None or known > length:
            return None, 0
        for layer in kept.layers:
            if type(layer) is GrowingLayer:
                layer.crop(known - held)
        return kept, known
