"""Trials: measure the candidate engines on a few layers of the target.

A decoder is a stack of equal layers, so that the time of a forward pass is that of a few layers, with embedding and
output head, plus the time of a layer for each of the others. A trial therefore takes the time and the memory of a few
layers, however large the model is. Layers of another kind (sliding attention, experts) are measured as well.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from itertools import count as count_from
from math import inf
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.decode.layer_cut import chosen_layers, first_layers, layer_kinds, shell
from utils.engine import selftest, threads
from utils.engine.engine_choice import COMPARED_WIDTHS, PREFILL_TOKENS, EngineFigures, lower_quartile
from utils.engine.forward_timing import ForwardProbe
from utils.engine.layer_engine import LayerEngine, Report, unreported
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.freed_memory import release_memory

EXTRA_BYTES = 1 << 27  # of layers beyond the first of each kind
EXTRA, MOST_EXTRA = 1, 8  # such layers of each kind at least, if there are so many, and at most
EVICTED = 1 << 28  # bytes that are read before each pass
THREAD_TURNS, STEPS = 4, 2  # turns of all numbers of threads, and decode steps of each
WIDE = -1  # the key of a wide pass among those of depths
MIN_TURNS, MAX_TURNS, ENOUGH = 2, 9, 1.2  # turns of all engines; further ones do not begin after these seconds
SLOW_PREFILL, FEWER_TOKENS = 0.6, 128  # seconds of a prefill from which fewer tokens are read
MAX_SLOWNESS = 2.0  # a candidate with a decode step longer than this many of the best one is given up
MORE_THREADS = 1.15  # more threads are not tried after a number that takes this many times the best one
PLAIN = "plain"
MAX_REASON = 200  # characters of an error message
FAILED = "the self-test failed, {}"
SLOW = "a decode step of {} takes {:.1f} times that of {}"
Result = TypeVar("Result")
Build = Callable[[Sequence[PreTrainedModel], Sequence[nn.Module], EngineWeights], LayerEngine]


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Which layers are measured. order: their indices; empty for a model that cannot be cut. factors: the time of a
    pass of the whole model is the sum of the times of the first layers of the order, by their number, times these.
    """

    order: tuple[int, ...]
    factors: Mapping[int, float]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "SlicePlan":
        try:
            kinds = layer_kinds(model)
        except UserError:
            return cls((), {0: 1.0})
        sizes = _block_bytes(model)
        return cls.for_kinds(kinds, max(EXTRA, min(MOST_EXTRA, EXTRA_BYTES // max(1, sizes))))

    @classmethod
    def for_kinds(cls, kinds: Sequence[object], extra: int) -> "SlicePlan":
        """kinds: of each layer. extra: how many layers of each kind to measure beyond the first."""
        layers = {kind: [index for index, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)}
        order = [indices[0] for indices in layers.values()]
        factors = {len(order): 1.0}
        for indices in layers.values():
            further = indices[1 : 1 + extra]
            if further:  # (time with them - time without them) / their number is the time of a layer
                share, before = (len(indices) - 1) / len(further), len(order)
                order += further
                factors[before] -= share
                factors[len(order)] = share
        return cls(tuple(order), {depth: factor for depth, factor in factors.items() if factor})

    def slice_of(self, model: PreTrainedModel) -> PreTrainedModel:
        """A model of these layers, which shares all weights with the whole one."""
        return chosen_layers(model, self.order) if self.order else shell(model)

    def parts(self, part: PreTrainedModel) -> dict[int, PreTrainedModel]:
        """The models whose times are summed, cut from a slice that an engine computes."""
        whole = len(self.order)
        return {depth: part if depth == whole else first_layers(part, depth) for depth in self.factors}

    def total(self, seconds: Mapping[int, float]) -> float:
        """The time of the whole model. Noise must not make a layer faster than nothing."""
        estimate = sum(self.factors[depth] * seconds[depth] for depth in self.factors)
        return max(estimate, *seconds.values())


@dataclass(frozen=True, slots=True)
class Meter:
    """How time is measured. Tests replace both. probe: of a model that an engine with this name computes."""

    clock: Callable[[], float] = time.perf_counter
    probe: Callable[[PreTrainedModel, str], ForwardProbe] = field(default=lambda model, name: ForwardProbe(model))


@dataclass
class _Candidate:
    """An engine that computes a slice. samples: seconds of passes by width and depth."""

    name: str
    engine: LayerEngine
    probes: Mapping[int, ForwardProbe]
    samples: dict[int, dict[int, list[float]]] = field(default_factory=dict)


@dataclass
class Trials:
    """The measurements of engines with one model, the target, whose plain layers must be in place.

    builders: makes the engines by name. weights: the format in which they compute. thread_counts: the numbers of
    threads to measure. reference: what they were compared with, if that is the beginning of the model. evicts: whether
    caches are emptied before each pass, as the other layers of a whole model do.
    """

    model: PreTrainedModel
    builders: Mapping[str, Build]
    weights: EngineWeights
    thread_counts: Sequence[int]
    report: Report = unreported
    meter: Meter = field(default_factory=Meter)
    evicts: bool = True
    reference: selftest.Reference | None = None
    _table: dict[str, EngineFigures] = field(default_factory=dict)
    _read: PreTrainedModel | None = None

    def run(self) -> dict[str, EngineFigures]:
        """Measure the engines and return their figures. The model is unchanged, also after an error."""
        self._plan = SlicePlan.of(self.model)
        self._buffer = torch.ones(self._evicted() // 4)
        reference = self._reference()
        if PLAIN not in self.builders:
            self._read = None
            release_memory()  # it is as large as all engines together
        candidates = []
        for name in self.builders:
            candidate = self._guarded(name, partial(self._made, name, reference))
            if candidate is not None:
                candidates.append(candidate)
        candidates = [candidate for candidate in candidates if not self._is_slow(candidate)]
        self._measure_widths(candidates)
        for candidate in candidates:
            self._guarded(candidate.name, partial(self._finish, candidate))
        return self._table

    def _evicted(self) -> int:
        left_out = self.model.config.get_text_config(decoder=True).num_hidden_layers - len(self._plan.order)
        return min(EVICTED, left_out * _block_bytes(self.model)) if self.evicts and self._plan.order else 0

    def _reference(self) -> torch.Tensor:
        """Logits of the slice as transformers computes it with the weights that the engines have."""
        self.report("engines: reading a few layers")
        part = self._plan.slice_of(self.model)
        selftest.read_weights(part, self.weights)
        self._read = part  # the plain engine computes it
        if not set(self.builders) - {PLAIN}:
            return torch.empty(0)
        logits, depth = selftest.sample_logits(part), len(self._plan.order)
        if self._plan.order == (*range(depth),) and depth >= selftest.COMPARED_LAYERS:
            self.reference = selftest.Reference(depth, logits, self.weights.as_loaded)
        return logits

    def _guarded(self, name: str, attempt: Callable[[], Result]) -> Result | None:
        """The result of a step, or None if the engine raised an error, which is noted."""
        try:
            return attempt()
        except Exception as error:
            problem = FAILED.format(reason_of(error))
            self._table[name] = replace(self._table.get(name, EngineFigures()), problem=problem, failed=True)
            return None

    def _made(self, name: str, reference: torch.Tensor) -> _Candidate | None:
        """An engine on a slice of its own, with the number of threads that is the fastest for it."""
        self.report(f"engine {name}: preparing a few layers")
        torch.set_num_threads(self.thread_counts[0])
        part = self._read if name == PLAIN and self._read else self._plan.slice_of(self.model)
        engine = self.builders[name]([part], [], self.weights)
        row = EngineFigures(promise=engine.promise, measured_on=date.today().isoformat(), estimated=True)
        failure = self._installed(engine, part, reference)
        self._table[name] = replace(row, problem=FAILED.format(failure) if failure else "", failed=bool(failure))
        if failure:
            return None
        probes = {depth: self.meter.probe(cut, name) for depth, cut in self._plan.parts(part).items()}
        candidate = _Candidate(name, engine, probes)
        measured, steps = self._steps(candidate)
        best = threads.fewest(measured)
        engine.set_threads(best)
        self._table[name] = replace(
            row, promise=engine.promise, threads=best, steps=tuple(steps.items()), step_seconds=steps[best]
        )
        return candidate

    def _installed(self, engine: LayerEngine, part: PreTrainedModel, reference: torch.Tensor) -> str:
        """Install an engine on a slice. Returns why its logits are not those of the reference."""
        if part is self._read:  # it computes the reference
            return engine.install(self.report)
        differs = partial(selftest.deviation, part, reference, exact=self.weights.as_loaded)
        return install_compared(engine, part, partial(engine.install, self.report), differs)

    def _steps(self, candidate: _Candidate) -> tuple[dict[int, float], dict[int, float]]:
        """By number of threads, in ascending order: seconds of a decode step and a wide pass through all measured
        layers, and of a decode step of the whole model. That estimate multiplies the noise of a layer by their number.
        """
        samples: dict[int, list[dict[int, float]]] = {}  # seconds of a step by depth, and of a wide pass under WIDE
        start = self.meter.clock()
        for turn in range(THREAD_TURNS):  # numbers take turns, so that other load affects all of them alike
            fastest = inf
            for count in self.thread_counts:
                self.report(f"engine {candidate.name}: measuring with {count} thread{'s' if count > 1 else ''}")
                candidate.engine.set_threads(count)
                times = self._thread_sample(candidate)
                if turn:  # the first turn warms up
                    samples.setdefault(count, []).append(times)
                    fastest = min(fastest, _step_and_wide(times))
                    if _step_and_wide(times) > MORE_THREADS * fastest:
                        break
            if turn and self.meter.clock() - start > ENOUGH:
                break
        measured = {count: min(map(_step_and_wide, times)) for count, times in samples.items()}
        quartiles = {
            count: {depth: lower_quartile([one[depth] for one in times]) for depth in candidate.probes}
            for count, times in samples.items()
        }
        return measured, {count: self._plan.total(seconds) for count, seconds in quartiles.items()}

    def _thread_sample(self, candidate: _Candidate) -> dict[int, float]:
        """The shortest of a few decode steps by depth, and the time of a wide pass through all layers. A decode step
        mostly waits for memory, so that one thread may be as fast as several. Wide passes do not.
        """
        deepest = candidate.probes[max(candidate.probes)]
        (wide,) = self._passes(deepest, min(COMPARED_WIDTHS[-1], deepest.max_width), 1)
        steps = {depth: min(self._passes(probe, 1, STEPS)) for depth, probe in candidate.probes.items()}
        return steps | {WIDE: wide}

    def _passes(self, probe: ForwardProbe, width: int, repeats: int) -> Iterator[float]:
        """Seconds of forward passes."""
        for _ in range(repeats):
            probe.make_room(width)
            if self._buffer.numel():
                self._buffer.sum()
            start = self.meter.clock()
            probe.forward(width)
            yield self.meter.clock() - start

    def _is_slow(self, candidate: _Candidate) -> bool:
        """Whether a candidate is not worth further measurements, judged by its decode step alone."""
        rows = {name: row for name, row in self._table.items() if row.is_candidate}
        best = min(rows, key=lambda name: rows[name].step_seconds)
        row = self._table[candidate.name]
        ratio = row.step_seconds / max(rows[best].step_seconds, 1e-9)
        if ratio <= MAX_SLOWNESS:
            return False
        self._table[candidate.name] = replace(row, problem=SLOW.format(candidate.name, ratio, best))
        return True

    def _measure_widths(self, candidates: Sequence[_Candidate]) -> None:
        """Measure decode steps and verify passes of all engines in turns, under the same conditions."""
        start = self.meter.clock()
        for turn in count_from(1):
            self.report(f"engines: measuring verify passes, turn {turn}")
            for candidate in candidates if turn % 2 else reversed(candidates):
                self._guarded(candidate.name, partial(self._turn, candidate))
            if turn >= MAX_TURNS or (turn >= MIN_TURNS and self.meter.clock() - start > ENOUGH):
                return

    def _turn(self, candidate: _Candidate) -> None:
        candidate.engine.set_threads(self._table[candidate.name].threads)
        for probe in candidate.probes.values():
            probe.forward(1)  # wakes the threads after those of another engine
        for width in (1, *COMPARED_WIDTHS):
            for depth, probe in candidate.probes.items():
                if width <= probe.max_width:
                    seconds = [*self._passes(probe, width, 1)]
                    candidate.samples.setdefault(width, {}).setdefault(depth, []).extend(seconds)

    def _finish(self, candidate: _Candidate) -> None:
        """From the samples to figures, and the speed of a prefill."""
        row = self._table[candidate.name]
        if not row.is_candidate:
            return
        self.report(f"engine {candidate.name}: reading a long prompt")
        candidate.engine.set_threads(row.threads)
        totals = {
            width: self._plan.total({depth: lower_quartile(times) for depth, times in by_depth.items()})
            for width, by_depth in candidate.samples.items()
        }
        step = totals[1]
        # Noise can make a wider pass look faster than a decode step, but a verify pass cannot save time.
        costs = tuple((width, max(1.0, total / step)) for width, total in totals.items() if width > 1 and step)
        reading = {depth: self._prefill_seconds(probe) for depth, probe in candidate.probes.items()}
        rate = PREFILL_TOKENS / max(self._plan.total(reading), 1e-9)
        self._table[candidate.name] = replace(row, step_seconds=step, costs=costs, prefill=rate)

    def _prefill_seconds(self, probe: ForwardProbe) -> float:
        """Seconds of a prefill of PREFILL_TOKENS, from fewer tokens if these take long."""
        seconds = 0.0
        for count in (FEWER_TOKENS, PREFILL_TOKENS):
            if seconds < SLOW_PREFILL:
                start = self.meter.clock()
                tokens = probe.prefill(count)
                seconds = (self.meter.clock() - start) * PREFILL_TOKENS / tokens
        return seconds


def _step_and_wide(times: Mapping[int, float]) -> float:
    """Seconds of a decode step through all measured layers and of a wide pass."""
    return times[max(times)] + times[WIDE]


def install_compared(
    engine: LayerEngine, model: PreTrainedModel, install: Callable[[], str], differs: Callable[[], str]
) -> str:
    """Install an engine and compare its logits. Returns why it failed.

    If a forward pass of its own has other logits, that of transformers over the same kernels may have the right ones.
    """
    failure = install() or differs()
    if failure and engine.has_own_forward and "forward" in vars(model):
        engine.remove()
        engine.has_own_forward = False
        failure = install() or differs()
    return failure


def reason_of(error: Exception) -> str:
    """Return an error as a reason: its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(iter(lines), type(error).__name__)[:MAX_REASON]


def _block_bytes(model: PreTrainedModel) -> int:
    """The bytes of a block, on average, as loaded."""
    total = sum(part.nbytes for name, part in model.named_parameters() if ".layers." in name or ".h." in name)
    return int(total // max(1, model.config.get_text_config(decoder=True).num_hidden_layers))
