"""Measure how long forward passes of different widths take: the costs that /gamma auto works with.

Each time is the median of a few repeats, because real runs are not faster than usual either. A slow model is measured
with fewer repeats and widths, and its long context is not computed: how long a pass takes depends on the number of
keys, not on their values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median_low
from time import perf_counter

import torch
from transformers import PreTrainedModel

from utils.decode.model_info import cache_bytes, context_length, sample_ids, vocabulary_size
from utils.decode.model_session import ModelSession
from utils.engine.layer_engine import Report, unreported
from utils.engine.weight_format import LONG, LONG_BYTES
from utils.errors import UserError

SHORT = 64  # tokens before the first timed forward pass
READ = 4  # of these that are computed; the others are copies
WIDTHS = (1, 2, 3, 5, 9, 17)
WIDE = 9
LONG_WIDTHS = (1, WIDE)  # in the longer context: what attention adds grows evenly with the width
REPEATS, FEWEST = 11, 2
ENOUGH = 1.5  # seconds within which REPEATS must end
SLOW_STEP = 0.1  # seconds of a decode step from which the widest pass is left out
COOLED = 0.05  # seconds after a wide pass in which decode steps take longer
TOLERANCE = 1.2  # of a pass over a wider one
STALE = 4 / 3  # a time that has changed by more than this ratio
CHECKED_WIDTH, CHECK_REPEATS = 5, 3


@dataclass(frozen=True, slots=True)
class LongerContext:
    """What was measured in a longer context. short: tokens of the shorter one. length: of this one. step_seconds,
    costs: as `verify_costs` returns them.
    """

    short: int
    length: int
    step_seconds: float
    costs: tuple[float, ...]


class ForwardProbe:
    """Consecutive forward passes of a model over a sample text of `length` tokens, or fewer in a short context."""

    def __init__(self, model: PreTrainedModel, length: int = SHORT) -> None:
        self._model = model
        limit, self._vocabulary = context_length(model), vocabulary_size(model)
        self.max_width = WIDTHS[-1] if limit is None else min(WIDTHS[-1], limit // 2)
        self.length = length if limit is None else min(length, limit - self.max_width)
        self._context: list[int] = []
        self._restart()

    def longer(self) -> "ForwardProbe | None":
        """Return a probe of a clearly longer text. None if the context is too short, or reading the text takes long."""
        limit, each = context_length(self._model), max(1, cache_bytes(self._model, 1))
        length = min(LONG, LONG_BYTES // each, *(() if limit is None else (limit - self.max_width,)))
        is_fast = self._is_padded or self._model.device.type != "cpu"
        return ForwardProbe(self._model, length) if is_fast and length >= 2 * self.length else None

    def make_room(self, width: int) -> None:
        """Start the text anew if the model's context has no room for `width` more tokens."""
        room = self._session.room(self._context)
        if room is not None and room < width:
            self._restart()

    def forward(self, width: int) -> None:
        """Run one forward pass over `width` new tokens."""
        self.make_room(width)
        context = self._context + sample_ids(width, self._vocabulary)
        float(self._session.feed(context, keep=width)[0, 0])  # waits for a GPU to finish
        if self._is_padded:
            self._session.rewind(len(self._context))  # the next pass has the same context length
        else:
            self._context = context

    def prefill(self, count: int) -> int:
        """Read a prompt of at most `count` tokens. Returns their number, less in a short context."""
        limit = context_length(self._model)
        count = count if limit is None else min(count, limit - 1)
        session = self._new_session()
        float(session.feed(session.begin(sample_ids(count, self._vocabulary)), keep=1)[0, 0])
        return count

    def _restart(self) -> None:
        end = max(1, self.length - 1)
        for count in dict.fromkeys((min(READ, end), end)):
            self._session = self._new_session()
            self._context = self._session.begin(sample_ids(count, self._vocabulary))
            self._session.feed(self._context, keep=1)
            self._is_padded = self._session.pad_cache(end)
            if self._is_padded:
                self._context = sample_ids(end, self._vocabulary)
                return

    def _new_session(self) -> ModelSession:
        try:
            return ModelSession(self._model, rewinds=False)
        except UserError:  # the cache cannot be used; the strategies will report it
            return ModelSession(self._model, rewinds=False, use_cache=False)


def verify_costs(
    probe: ForwardProbe, *, report: Report = unreported, shorter: Sequence[float] = ()
) -> tuple[float, tuple[float, ...]]:
    """Return the seconds of a decode step, and the extra time of verify passes with 1, 2, ... drafts in units of a
    decode step.

    Costs between the measured widths are interpolated linearly. shorter: the costs in a shorter context; then few
    widths are measured, and differences from these costs are interpolated.
    """
    widths = [width for width in LONG_WIDTHS if width <= len(shorter) + 1]
    if not shorter:
        start = perf_counter()
        probe.forward(1)
        fast = perf_counter() - start < SLOW_STEP
        widths = [width for width in (WIDTHS if fast else WIDTHS[:-1]) if width <= probe.max_width]
    times = width_seconds(probe, widths, enough=ENOUGH / (2 if shorter else 1), report=report)
    seconds = {width: median_low(values) for width, values in times.items()}
    step = seconds[1]
    # Noise can make a wider pass look faster than a narrower one, but more rows never save time.
    measured = [max(0.0, seconds[width] / step - 1) if step else 0.0 for width in widths]
    extra = dict(zip(widths, _rising(measured), strict=True))
    if not shorter:
        return step, tuple(_interpolated(extra, width) for width in range(2, widths[-1] + 1))
    more = {width: extra[width] - (shorter[width - 2] if width > 1 else 0.0) for width in widths}
    return step, tuple(max(0.0, cost + _interpolated(more, width)) for width, cost in enumerate(shorter, start=2))


def _rising(values: Iterable[float]) -> list[float]:
    """The values that never fall and are closest to these in squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # sums, and how many values each is of
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, others = pools.pop()
            total, count = total + before, count + others
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def _interpolated(values: Mapping[int, float], width: int) -> float:
    """The value at a width, on the line through those at the nearest two widths, or the only one."""
    pairs = [*pairwise(sorted(values))] or [(1, 1)]
    low, high = next((pair for pair in pairs if width <= pair[1]), pairs[-1])
    return values[low] + (width - low) * (values[high] - values[low]) / max(1, high - low)


def width_seconds(
    probe: ForwardProbe,
    widths: Sequence[int],
    *,
    repeats: int = REPEATS,
    enough: float = inf,
    report: Report = unreported,
) -> dict[int, list[float]]:
    """Return the seconds of `repeats` forward passes by width, or of as many as end within `enough` seconds, but at
    least FEWEST, and all if the machine seems to be busy.
    """
    times: dict[int, list[float]] = {width: [] for width in widths}
    begin = perf_counter()
    for repeat in range(repeats):
        takes_long = repeat >= FEWEST and (perf_counter() - begin) * (repeat + 1) / repeat > enough
        if takes_long and not _is_disturbed(times):
            break
        report(f"measuring verify passes: round {repeat + 1} of {repeats}")
        if repeat and times[widths[0]][-1] < COOLED:
            _cool_down(probe)
        # Widths take turns, so that a machine that slows down or speeds up affects all of them alike.
        for width in widths:
            probe.make_room(width)  # outside the timed section
            start = perf_counter()
            probe.forward(width)
            times[width].append(perf_counter() - start)
    return times


def _cool_down(probe: ForwardProbe) -> None:
    """Let decode steps pass untimed, because they take longer for a while after a wide pass on some processors."""
    start = perf_counter()
    while True:
        probe.make_room(1)
        probe.forward(1)
        if perf_counter() - start >= COOLED:
            break


def _is_disturbed(times: Mapping[int, Sequence[float]]) -> bool:
    """Whether passes took clearly longer than wider ones, in the order of their widths."""
    medians = map(median_low, times.values())
    return any(narrow > TOLERANCE * wide for narrow, wide in pairwise(medians))


def times_have_changed(probe: ForwardProbe, step_seconds: float, costs: Sequence[float]) -> bool:
    """Return whether a decode step or a verify pass takes a clearly different time from these measured ones."""
    widths = [width for width in (1, CHECKED_WIDTH) if width <= min(probe.max_width, len(costs) + 1)]
    known = {width: step_seconds * (1 + (costs[width - 2] if width > 1 else 0.0)) for width in widths}
    now = width_seconds(probe, widths, repeats=CHECK_REPEATS)
    # The shortest of a few, because a single interruption is no reason to measure again.
    changes = [min(now[width]) / known[width] for width in widths if known[width]]
    return any(not 1 / STALE <= change <= STALE for change in changes)


def faster_threads(probe: ForwardProbe, count: int, others: Sequence[int]) -> int:
    """Return the fastest of the other numbers of threads if a decode step and a wide pass are clearly faster with it
    than with `count`, and otherwise `count`. One thread may keep memory as busy as several, but is slower at a prompt.
    """
    fastest: dict[int, float] = {}
    for number in (*others, count):
        torch.set_num_threads(number)
        times = width_seconds(probe, [1, min(WIDE, probe.max_width)], repeats=CHECK_REPEATS)
        fastest[number] = sum(map(min, times.values()))
    best = min(others, key=fastest.__getitem__)
    return best if fastest[best] * STALE < fastest[count] else count
