"""Recurrent and hybrid caches: a state cannot be cropped, so a rewind restores a copy and accepted tokens are
computed again.

Whether that is correct depends on the model's class: some compute several tokens after a state differently from
single tokens, without an error, and some keep their state where it cannot be copied. So it is tried, once per model,
on the model's own weights.
"""

import copy
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

from utils.decode.kv_cache import GrowingLayer, new_cache
from utils.decode.logit_drift import MAX_RELATIVE, largest_difference, logits_by_width, max_rounding
from utils.decode.model_info import sample_ids
from utils.decode.session import ForkableSession
from utils.errors import UserError

PREFIX, PROBED = 4, 24  # tokens before the probed ones, and including them
WIDTHS = (2, 3)  # verify widths that are tried


class CacheSupport(Enum):
    """What a model's cache supports. The value is the message if that is not enough."""

    VERIFY = ""
    STEPS = (
        "{} computes several tokens after its recurrent state differently from single tokens, "
        "so drafts cannot be verified with its cache"
    )
    NOTHING = "{} keeps its recurrent state in a form that cannot be used here"


_known: WeakKeyDictionary[Any, CacheSupport] = WeakKeyDictionary()


def is_recurrent(model: Any) -> bool:
    """Whether the model's cache holds more than keys and values."""
    return bool(getattr(model, "_is_stateful", False)) or not new_cache(model.config).is_croppable


def check_cache_support(model: Any, new_session: Callable[[], ForkableSession], *, verifies: bool) -> None:
    """Raise UserError unless the model's cache supports decode steps and, with `verifies`, verify passes.

    new_session: returns fresh sessions that will not be rewound.
    """
    if model not in _known:
        _known[model] = _probe(new_session)
    support = _known[model]
    if support is CacheSupport.NOTHING or (verifies and support is CacheSupport.STEPS):
        remedy = " or run the target alone" if support is CacheSupport.STEPS else ""
        reason = support.value.format(new_session().name)
        raise UserError(f"{reason}; turn the cache off (/cache off, use_cache=False){remedy}.")


def _probe(new_session: Callable[[], ForkableSession]) -> CacheSupport:
    session = new_session()
    count = min(PROBED, session.context_length or PROBED)
    tokens = sample_ids(count, session.vocab_size)
    try:
        # Rows after PREFIX: in one pass from an empty state, then from a stored state with 1, 2 and 3 rows per pass.
        at_once = new_session().feed(tokens, keep=len(tokens) - PREFIX)
        session.feed(tokens[:PREFIX], keep=1)
        steps, *wider = (logits_by_width(session, tokens, len(at_once), width) for width in (1, *WIDTHS))
    except (AttributeError, LookupError, TypeError, ValueError):  # a cache of an unknown type, or none
        return CacheSupport.NOTHING
    # Kernels for single and for several steps may differ by more than rounding and still compute the same model.
    if largest_difference(steps, at_once) > MAX_RELATIVE * float(at_once.amax(dim=-1).abs().max()):
        return CacheSupport.NOTHING
    exact = all(largest_difference(steps, logits) <= max_rounding(steps) for logits in wider)
    return CacheSupport.VERIFY if exact else CacheSupport.STEPS


class StateCheckpoint:
    """The last cache before drafts, which a rewind restores.

    Layers that only grow are shared with the live cache and cropped on restore. All others are copied.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, int] | None = None  # a cache and its length
        self._fed = False  # since the last rewind

    def is_due(self, keep: int) -> bool:
        """Whether a feed that keeps this many rows brings the first drafts. A one-row feed after a rewind brings text
        only.
        """
        # A drafter feeds one row at a time: its second feed after a rewind is the first that holds a draft.
        due = self._kept is None and (keep > 1 or self._fed)
        self._fed = True
        return due

    def keep(self, cache: Any, length: int) -> None:
        """Take a copy of a cache of this length."""
        twin = copy.copy(cache)
        if twin is not None:
            twin.layers = [layer if type(layer) is GrowingLayer else copy.deepcopy(layer) for layer in cache.layers]
        self._kept = twin, length

    def rewound(self, cache: Any, held: int, length: int) -> tuple[Any, int]:
        """A cache of at most `length` positions and its length, from the live one with `held` positions.

        Returns (None, 0), which recomputes everything, if there is no suitable copy.
        """
        kept, known = self._kept or (None, 0)
        self._kept, self._fed = None, False
        if held <= length:  # every draft was accepted: the live state is that of the text
            return cache, held
        if kept is None or known > length:
            return None, 0
        for layer in kept.layers:
            if type(layer) is GrowingLayer:
                # Shared with the live cache, so it holds `held` positions; crop requires a negative count.
                layer.crop(known - held)
        return kept, known
