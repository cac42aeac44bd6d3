"""How fast a model goes here: forwards of any width behind a growing text, and what a wider window costs.

A few repeats, and the middle one of them: runs go at no better pace than usual either.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

from utils.decode.model_session import ModelSession, context_length, vocabulary_size
from utils.errors import UserError

START = 192  # tokens before the first forward
WIDTHS = (1, 2, 3, 5, 9, 17)
REPEATS = 5


class Pace:
    """Forwards of a model over made-up text, one behind the other."""

    def __init__(self, model: Any) -> None:
        self._model = model
        bound, self._vocabulary = context_length(model), vocabulary_size(model)
        self.widest = WIDTHS[-1] if bound is None else min(WIDTHS[-1], bound // 2)
        self._start = START if bound is None else min(START, bound - self.widest)
        self._restart()

    def make_room(self, width: int) -> None:
        """For so many new tokens: the text starts anew where the model's context is full."""
        room = self._session.room(self._context)
        if room is not None and room < width:
            self._restart()

    def forward(self, width: int) -> None:
        """One forward over `width` new tokens."""
        self.make_room(width)
        self._context += sample_ids(width, self._vocabulary)
        float(self._session.feed(self._context, keep=width)[0, 0])  # a GPU is done when its result is here

    def _restart(self) -> None:
        self._session = self._opened()
        self._context = self._session.begin(sample_ids(max(1, self._start - 1), self._vocabulary))
        self._session.feed(self._context, keep=1)

    def _opened(self) -> ModelSession:
        try:
            return ModelSession(self._model, rewinds=False)
        except UserError:  # a cache that does not serve: the strategies will say so, and run without one
            return ModelSession(self._model, rewinds=False, use_cache=False)


def window_costs(
    pace: Pace, clock: Callable[[], float] = time.perf_counter, *, repeats: int = REPEATS
) -> tuple[float, tuple[float, ...]]:
    """Seconds of a forward without drafts, and what one with 1, 2, ... drafts takes more, in units of that, between the widths tried."""
    widths = [width for width in WIDTHS if width <= pace.widest]
    taken: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repeats):
        for width in widths:
            pace.make_room(width)  # no window pays for that
            began = clock()
            pace.forward(width)
            taken[width].append(clock() - began)
    seconds = {width: median(found) for width, found in taken.items()}
    plain = seconds[1]
    extra = {width: max(0.0, seconds[width] / plain - 1) if plain else 0.0 for width in widths}
    costs: list[float] = []
    for low, high in pairwise(widths):
        slope = (extra[high] - extra[low]) / (high - low)
        costs += [extra[low] + slope * step for step in range(1, high - low + 1)]
    return plain, tuple(costs)


def sample_ids(count: int, vocabulary: int) -> list[int]:
    """Token ids from all over the vocabulary."""
    return [(7919 * (index + 1)) % vocabulary for index in range(count)]
