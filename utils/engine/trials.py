"""Trials: measure the candidate engines on a few layers of the target.

A decoder is a stack of equal layers, so that the time of a forward pass is that of a few layers, with embedding and
output head, plus the time of a layer for each of the others. A trial therefore takes the time and the memory of a few
layers, however large the model is. Layers of another kind (sliding attention, experts) are measured as well.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from math import inf

import torch
from transformers import PreTrainedModel

from utils.decode.features import layer_count
from utils.decode.layer_cut import chosen_layers, first_layers, layer_kinds, shell
from utils.engine.engine_choice import (
    COMPARED_WIDTHS,
    PREFILL_TOKENS,
    TYPICAL,
    EngineFigures,
    Workload,
    choose,
    lower_quartile,
)
from utils.engine.forward_timing import ForwardProbe
from utils.engine.layer_engine import PlainEngine, Report, install_with_fallback, unreported
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError

EXTRA_BYTES = 1 << 27  # of layers beyond the first of each kind
EXTRA, MOST_EXTRA = 2, 8  # such layers of each kind at least, if there are so many, and at most
EVICTED = 1 << 28  # bytes that are read before each pass
THREAD_TURNS, STEPS = 4, 2  # turns of all numbers of threads, and decode steps of each
MIN_TURNS, MAX_TURNS, ENOUGH = 2, 9, 1.2  # turns of all engines; further ones do not begin after these seconds,
AT_MOST, SETTLED = 4.0, 1.05  # except on a busy machine: until these, or until two passes take the same time
SLOW_PREFILL = 0.6  # seconds of a prefill from which it is measured once
MAX_SLOWNESS = 2.0  # an engine with decode steps longer than this many of the best ones is measured in one turn
MORE_THREADS = 1.15  # more threads are not tried after a number that takes this many times the best one
CLEAR = 1.3  # fewer threads are not tried again after they have taken this many times the best one
WORTHWHILE = 0.95  # more threads must take at most this share of the time of fewer threads
PLAIN = "plain"
MAX_REASON = 200  # characters of an error message
FAILED = "the self-test failed, {}"


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
class Trials:
    """The measurements of engines with one model, the target, whose plain layers must be in place.

    builders: the classes of the engines by name. weights: the format in which they compute. thread_counts: the numbers
    of threads to measure. workload: what the engines are compared for. Logits are not compared: the self-test does that
    with the engine that is chosen.
    """

    model: PreTrainedModel
    builders: Mapping[str, type[PlainEngine]]
    weights: EngineWeights
    thread_counts: Sequence[int]
    report: Report = unreported
    meter: Meter = field(default_factory=Meter)
    workload: Workload = TYPICAL
    _probes: dict[str, Mapping[int, ForwardProbe]] = field(default_factory=dict)  # by engine and number of layers
    _samples: dict[str, dict[tuple[int, int], list[float]]] = field(default_factory=dict)  # by engine: width, layers
    _fastest: float = inf  # seconds of a wide pass and a decode step of all engines

    def run(self) -> dict[str, EngineFigures]:
        """Measure the engines and return their figures. The model is unchanged, also after an error."""
        today = date.today().isoformat()
        self._rows = {name: EngineFigures(estimated=True, measured_on=today) for name in self.builders}
        self._plan = SlicePlan.of(self.model)
        left_out = layer_count(self.model) - len(self._plan.order)
        # Read before each pass, because the other layers of a whole model empty the processor's caches.
        self._buffer = torch.ones(min(EVICTED, left_out * _block_bytes(self.model)) // 4 if self._plan.order else 0)
        self._for_each(self._prepare, self.builders)
        for _ in range(2):
            # The plain engine, which may be far slower, is the first one and comes last.
            self._for_each(self._choose_threads, [*self.builders][::-1] if len(self.thread_counts) > 1 else ())
            self._measure_widths()
            self._for_each(self._finish, self.builders)
            if not self._gives_up_bits():
                break  # otherwise a second time: the machine may have been busy
        return self._rows

    def _gives_up_bits(self) -> bool:
        """Whether these figures choose an engine without equal bits although there is one with them."""
        choice = choose(self._rows, self.workload).name
        promises = [row.promise for row in self._rows.values() if row.is_candidate]
        return any(promises) and not self._rows[choice].promise

    def _for_each(self, step: Callable[[str], None], names: Iterable[str]) -> None:
        """Take a step with the engines that have not failed."""
        for name in names:
            if self._rows[name].is_candidate:
                try:
                    step(name)
                except Exception as error:
                    self._rows[name] = failed_figures(error, self._rows[name])

    def _prepare(self, name: str) -> None:
        """Let an engine compute a few layers."""
        self.report(f"engine {name}: preparing a few layers")
        torch.set_num_threads(max(self.thread_counts))
        part = self._plan.slice_of(self.model)
        engine = self.builders[name]([part], [], self.weights)
        if failure := install_with_fallback(engine, self.report):
            self._rows[name] = replace(self._rows[name], problem=FAILED.format(failure))
            return
        self._rows[name] = replace(self._rows[name], promise=engine.promise, threads=self.thread_counts[0])
        self._probes[name] = {depth: self.meter.probe(cut, name) for depth, cut in self._plan.parts(part).items()}

    def _choose_threads(self, name: str) -> None:
        """Choose the smallest number of threads that no larger one clearly beats, by decode steps and wide passes: a
        decode step mostly waits for memory, so that one thread may be as fast as several.
        """
        samples: dict[int, list[float]] = {}
        start, probe, counts = self.meter.clock(), self._deepest(name), [*self.thread_counts]
        wide = min(COMPARED_WIDTHS[-1], probe.max_width)
        for turn in range(MAX_TURNS):  # numbers take turns, so that other load affects all of them alike
            fastest = inf
            for count in counts:
                torch.set_num_threads(count)
                self.report(f"engine {name}: measuring with {count} thread{'s' if count > 1 else ''}")
                seconds = self._pass(probe, wide) + min(self._pass(probe, 1) for _ in range(STEPS))
                samples.setdefault(count, []).append(seconds)
                fastest = min(fastest, seconds)
                if turn and seconds > MORE_THREADS * fastest:
                    break
            if turn == 0 and fastest <= MAX_SLOWNESS * self._fastest:
                samples = {}  # the first turn warms up, and is enough for an engine that is far slower than another one
                continue
            best = fewest_threads({count: min(times) for count, times in samples.items()})
            # Other work only lengthens passes, so that more threads that are clearly faster leave no need of fewer.
            counts = [count for count in counts if count >= best or min(samples[count]) <= CLEAR * min(samples[best])]
            took = self.meter.clock() - start
            is_reliable = _is_settled(samples[best]) and _is_settled(samples[max(samples)])
            if turn == 0 or len(counts) < 2 or took > AT_MOST:
                break
            if is_reliable and (took > ENOUGH or turn + 1 >= THREAD_TURNS):
                break
        self._fastest = min(self._fastest, *map(min, samples.values()))
        self._rows[name] = replace(self._rows[name], threads=best)

    def _pass(self, probe: ForwardProbe, width: int) -> float:
        """Seconds of a forward pass."""
        probe.make_room(width)
        if self._buffer.numel():
            self._buffer.sum()
        start = self.meter.clock()
        probe.forward(width)
        return self.meter.clock() - start

    def _measure_widths(self) -> None:
        """Measure decode steps and verify passes of all engines in turns, under the same conditions."""
        self._samples = {name: {} for name in self._probes}
        start, names, is_late = self.meter.clock(), [*self.builders], False
        for turn in range(1, MAX_TURNS + 1):
            self.report(f"engines: measuring verify passes, turn {turn}")
            self._for_each(partial(self._turn, is_late), names if turn % 2 else reversed(names))
            samples = {name: self._samples[name] for name in names if self._rows[name].is_candidate}
            steps = {name: sum(min(own[1, depth]) for depth in self._plan.factors) for name, own in samples.items()}
            # One turn of an engine that is far slower is enough.
            names = [name for name in steps if steps[name] <= MAX_SLOWNESS * min(steps.values())]
            # Further turns make a comparison more precise.
            took = self.meter.clock() - start
            is_late = turn >= MIN_TURNS and (len(names) < 2 or took > ENOUGH)
            if is_late and (took > AT_MOST or all(_is_settled(t) for name in names for t in samples[name].values())):
                return

    def _turn(self, is_late: bool, name: str) -> None:
        """Measure passes of all widths once. is_late: only those that other work on the machine may have lengthened."""
        torch.set_num_threads(self._rows[name].threads)
        probes = self._probes[name]
        for probe in probes.values():
            probe.forward(1)  # wakes the threads after those of another engine
        for width in (1, *COMPARED_WIDTHS):
            for depth, probe in probes.items():
                samples = self._samples[name]
                if width <= probe.max_width and not (is_late and _is_settled(samples[width, depth])):
                    samples.setdefault((width, depth), []).append(self._pass(probe, width))

    def _finish(self, name: str) -> None:
        """From the samples to figures, and the speed of a prefill."""
        self.report(f"engine {name}: reading a long prompt")
        torch.set_num_threads(self._rows[name].threads)
        totals, seconds = dict[int, float](), dict.fromkeys(self._plan.factors, inf)
        for width in sorted({width for width, _ in self._samples[name]}, reverse=True):
            for depth in seconds:
                typical = lower_quartile(self._samples[name][width, depth])
                # Fewer rows never take longer in an engine that computes each of them in the same way.
                seconds[depth] = min(typical, seconds[depth]) if self._rows[name].promise else typical
            totals[width] = self._plan.total(seconds)
        step = totals[1]
        # Noise can make a wider pass look faster than a decode step, but a verify pass cannot save time.
        costs = tuple((width, max(1.0, totals[width] / step)) for width in sorted(totals) if width > 1 and step)
        # Almost all of the time of a prefill is spent in layers, and all kinds of them take about as long.
        share = len(self._plan.order) / layer_count(self.model) if self._plan.order else 1.0
        rate = share / max(self._seconds_of_a_token(name), 1e-9)
        self._rows[name] = replace(self._rows[name], step_seconds=step, costs=costs, prefill=rate)

    def _seconds_of_a_token(self, name: str) -> float:
        """Of a prefill, the shorter one of two if they are short."""
        probe, times = self._deepest(name), list[float]()
        while len(times) < 2 and PREFILL_TOKENS * sum(times) < SLOW_PREFILL:
            start = self.meter.clock()
            tokens = probe.prefill(PREFILL_TOKENS)
            times.append((self.meter.clock() - start) / tokens)
        return min(times)

    def _deepest(self, name: str) -> ForwardProbe:
        """The probe of all measured layers."""
        return self._probes[name][max(self._probes[name])]


def fewest_threads(seconds: Mapping[int, float]) -> int:
    """Return the smallest number of threads that no larger number clearly beats."""
    best = min(seconds)
    for count in sorted(seconds)[1:]:
        if seconds[count] < WORTHWHILE * seconds[best]:
            best = count
    return best


def _is_settled(times: Sequence[float]) -> bool:
    """Whether the shortest time was found twice. Other work on the machine only lengthens passes."""
    shortest = sorted(times)[:2]
    return len(shortest) == 2 and shortest[1] <= SETTLED * shortest[0]


def failed_figures(error: Exception, row: EngineFigures) -> EngineFigures:
    """The row of an engine that raised an error. What is not implemented will not be at the next start either."""
    raised = not isinstance(error, NotImplementedError)
    return replace(row, problem=FAILED.format(reason_of(error)), raised=raised)


def reason_of(error: BaseException) -> str:
    """Return an error as a reason: its first line, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(iter(lines), type(error).__name__)[:MAX_REASON].rstrip(".")


def _block_bytes(model: PreTrainedModel) -> int:
    """The bytes of a block, on average, as loaded."""
    total = sum(part.nbytes for name, part in model.named_parameters() if ".layers." in name or ".h." in name)
    return int(total // layer_count(model))
