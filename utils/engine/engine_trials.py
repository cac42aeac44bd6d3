"""Trials: install the candidate engines in turn, test what they promise, and measure them on this machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

from transformers import PreTrainedModel

from utils.engine import threads
from utils.engine.engine_choice import TYPICAL, Workload, expected_speed
from utils.engine.engine_figures import COMPARED_WIDTHS, PREFILL_TOKENS, EngineFigures
from utils.engine.engine_samples import speed_ratio, with_samples
from utils.engine.forward_timing import ForwardProbe, width_seconds
from utils.engine.layer_engine import Report, unreported
from utils.engine.seat import PLAIN, Seat, reason_of

REPEATS = 3  # of each width, in the first turn and in a turn that begins with an installation
CLOSE = 1.2  # engines within this ratio of expected speeds are compared in turns
SEPARATE = 1.1  # after MIN_TURNS, such a ratio needs no further turns
MIN_TURNS, MAX_TURNS = 4, 8  # of each finalist, with one pass of each width
SLOW_TURNS = 2  # if an engine has to be installed for each of its turns
LATEST_TURN = 8.0  # seconds after the first turn of the finalists; a further one does not begin later
MAX_SLOWNESS = 2.0  # a candidate with a decode step longer than this many of the best one is given up
PREFILL_SECONDS = 1.0  # a prefill that takes less is repeated
FAILED = "the self-test failed, {}"
SLOW = "a decode step of {} takes {:.1f} times that of {}"


@dataclass(frozen=True, slots=True)
class Meter:
    """How time is measured. Tests replace both."""

    clock: Callable[[], float] = time.perf_counter
    probe: Callable[[PreTrainedModel], ForwardProbe] = ForwardProbe

    def prefill(self, probe: ForwardProbe) -> float:
        """Return the tokens per second of a prefill, the better of two unless the first one is slow."""
        rates: list[float] = []
        while not rates or (len(rates) < 2 and PREFILL_SECONDS * rates[0] > PREFILL_TOKENS):
            start = self.clock()
            count = probe.prefill(PREFILL_TOKENS)
            rates.append(count / max(self.clock() - start, 1e-9))
        return max(rates)


@dataclass
class Trials:
    """The measurements of the engines in a seat with one model, the target.

    thread_counts: the numbers of threads to measure. tests_all: whether to test what every engine promises; otherwise
    that is left to whoever uses one of them.
    """

    seat: Seat
    model: PreTrainedModel
    thread_counts: Sequence[int]
    tests_all: bool = False
    report: Report = unreported
    meter: Meter = field(default_factory=Meter)
    workload: Workload = TYPICAL
    table: dict[str, EngineFigures] = field(default_factory=dict)
    _probes: dict[str, ForwardProbe] = field(default_factory=dict)

    def run(self, names: Sequence[str]) -> dict[str, EngineFigures]:
        """Measure these engines. Returns their figures; one of them stays installed."""
        # Engines that can be parked come before others, on top of which they can then be measured in turns.
        for name in sorted(names, key=lambda name: (name != PLAIN, not self.seat.can_park(name))):
            self.table[name] = self._guarded(name, self._first_turn)
        finalists = self._finalists()
        if len(finalists) > 1:
            self._compare(finalists)
        return {name: self.table[name] for name in names}

    def _guarded(self, name: str, measure: Callable[[str], EngineFigures]) -> EngineFigures:
        """The figures of an engine, which may raise an error when it computes."""
        try:
            return measure(name)
        except Exception as error:
            if name == PLAIN:  # not the fault of an engine
                raise
            self.seat.remove()
            failure = reason_of(error)
            return EngineFigures(FAILED.format(failure), failed=True, promise=self.seat.engines[name].promise)

    def _first_turn(self, name: str) -> EngineFigures:
        engine = self.seat.engines[name]
        self._say(name, "preparing")
        # Layouts also suit one thread and all, so that other numbers can be set later.
        if failure := self.seat.install(name, sorted({*self.thread_counts, *threads.usual_counts()}), self.report):
            return EngineFigures(FAILED.format(failure), failed=True, promise=engine.promise)
        probe = self._probes[name] = self.meter.probe(self.model)
        self._say(name, "choosing the number of threads")
        steps = threads.step_seconds(lambda: probe.forward(1), self.thread_counts, engine.set_threads, self.meter.clock)
        count = threads.fewest(steps)
        engine.set_threads(count)
        figures = EngineFigures(
            promise=engine.promise,
            threads=count,
            steps=tuple(steps.items()),
            step_seconds=steps[count],
            nbytes=engine.nbytes(),
            measured_on=date.today().isoformat(),
        )
        if self.tests_all and (failure := self.seat.test_threads(count, self.report)):
            return replace(figures, problem=FAILED.format(failure), failed=True)
        figures = replace(figures, verified=self.seat.is_verified(count))
        if slow := self._slowness(name, figures):
            return replace(figures, problem=slow)
        self._say(name, "measuring verify passes")
        samples = width_seconds(probe, _widths(probe), self.meter.clock, repeats=REPEATS)
        self._say(name, "reading a long prompt")
        return replace(with_samples(figures, samples), prefill=self.meter.prefill(probe))

    def _slowness(self, name: str, figures: EngineFigures) -> str:
        """Why a candidate is not worth further measurements, judged by its decode step alone."""
        rivals = [other for other, row in self.table.items() if row.is_candidate]
        best = min(rivals, key=lambda other: self.table[other].step_seconds, default=None)
        ratio = figures.step_seconds / self.table[best].step_seconds if best else 0.0
        return SLOW.format(name, ratio, best) if ratio > MAX_SLOWNESS else ""

    def _finalists(self) -> list[str]:
        """The fastest engines if they are close. The installed one is first, since it need not be installed again."""
        speeds = {name: expected_speed(row, self.workload) for name, row in self.table.items() if row.is_candidate}
        order = sorted(speeds, key=lambda name: speeds[name])[-2:]
        close = [name for name in order if speeds[order[-1]] <= CLOSE * speeds[name]]
        return sorted(close, key=lambda name: name != self.seat.name)

    def _compare(self, names: Sequence[str]) -> None:
        """Measure engines in turns, under the same conditions. The times of the first turn do not count any more."""
        start = self.meter.clock()
        samples: dict[str, dict[int, list[float]]] = {name: {} for name in names}
        for turn in range(MAX_TURNS):
            for name in names if turn % 2 == 0 else reversed(names):
                self.table[name] = self._guarded(name, lambda name: self._turn(name, samples[name]))
                if not self.table[name].is_candidate:
                    return
            enough = MIN_TURNS if self.seat.can_switch(names) else SLOW_TURNS
            separate = turn + 1 >= enough and (
                enough == SLOW_TURNS or speed_ratio(self.table, samples, self.workload) > SEPARATE
            )
            if separate or self.meter.clock() - start > LATEST_TURN:
                break
        for name in names:
            self.table[name] = with_samples(self.table[name], samples[name])

    def _turn(self, name: str, samples: dict[int, list[float]]) -> EngineFigures:
        """Measure an engine after another one. It may not be possible to install it again."""
        figures, engine = self.table[name], self.seat.engines[name]
        self._say(name, "measuring again")
        repeats = 1 if self.seat.can_switch([name]) else REPEATS
        engine.set_threads(figures.threads)
        if failure := self.seat.install(name, [figures.threads], self.report):
            return replace(figures, problem=FAILED.format(failure), failed=True)
        engine.set_threads(figures.threads)
        probe = self._probes[name]  # its text is read already
        probe.forward(1)  # reads the weights again, after those of the other engine
        for width, seconds in width_seconds(probe, _widths(probe), self.meter.clock, repeats=repeats).items():
            samples.setdefault(width, []).extend(seconds)
        return figures

    def _say(self, name: str, what: str) -> None:
        self.report(f"engine {name}: {what}")


def _widths(probe: ForwardProbe) -> list[int]:
    return [width for width in (1, *COMPARED_WIDTHS) if width <= probe.max_width]
