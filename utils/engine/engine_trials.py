"""Trials: install the candidate engines in turn, test what they promise, and measure them on this machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from math import inf
from statistics import median

from transformers import PreTrainedModel

from utils.engine import threads
from utils.engine.engine_choice import expected_speed
from utils.engine.engine_figures import COMPARED_WIDTHS, PREFILL_TOKENS, EngineFigures
from utils.engine.forward_timing import ForwardProbe, width_seconds
from utils.engine.layer_engine import Report, unreported
from utils.engine.seat import PLAIN, Seat, reason_of

REPEATS = 3  # of each width, in each turn
FINAL_TURNS = 2  # of each finalist
LATEST_TURN = 15.0  # seconds after the start; a further turn of the finalists does not begin later
CLOSE = 1.2  # engines within this ratio of expected speeds are measured again in turns
MAX_SLOWNESS = 1.5  # a candidate with a decode step longer than this many of the best one is given up
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

    thread_counts: the numbers of threads to measure. tested_counts: those that an installation tests.
    """

    seat: Seat
    model: PreTrainedModel
    thread_counts: Sequence[int]
    tested_counts: Sequence[int]
    report: Report = unreported
    meter: Meter = field(default_factory=Meter)
    table: dict[str, EngineFigures] = field(default_factory=dict)
    _samples: dict[str, dict[int, float]] = field(default_factory=dict)

    def run(self, names: Sequence[str]) -> dict[str, EngineFigures]:
        """Measure these engines. Returns their figures; one of them stays installed."""
        start = self.meter.clock()
        for name in names:
            self.table[name] = self._attempted(name)
        finalists = self._finalists()
        for turn in range(FINAL_TURNS if len(finalists) > 1 else 0):
            # The first one in any case: two engines that were measured minutes apart must not be compared.
            if turn and self.meter.clock() - start > LATEST_TURN:
                break
            for name in finalists:
                self._further_turn(name)
        return self.table

    def _attempted(self, name: str) -> EngineFigures:
        """The figures of an engine, which may raise an error when it computes."""
        try:
            return self._first_turn(name)
        except Exception as error:
            if name == PLAIN:  # not the fault of an engine
                raise
            self.seat.remove()
            failure = reason_of(error)
            return EngineFigures(FAILED.format(failure), failed=True, promise=self.seat.engines[name].promise)

    def _first_turn(self, name: str) -> EngineFigures:
        engine = self.seat.engines[name]
        self._say(name, "preparing")
        if failure := self.seat.install(name, self.tested_counts, self.report):
            return EngineFigures(FAILED.format(failure), failed=True, promise=engine.promise)
        probe = self.meter.probe(self.model)
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
        if failure := self.seat.test_threads(count, self.report):
            return replace(figures, problem=FAILED.format(failure), failed=True)
        figures = replace(figures, verified=self.seat.is_verified(count))
        if slow := self._slowness(name, figures):
            return replace(figures, problem=slow)
        self._samples[name] = {}
        figures = self._measured(name, figures, probe)
        self._say(name, "reading a long prompt")
        return replace(figures, prefill=self.meter.prefill(probe))

    def _slowness(self, name: str, figures: EngineFigures) -> str:
        """Why a candidate is not worth further measurements, judged by its decode step alone."""
        rivals = [other for other, row in self.table.items() if row.is_candidate]
        best = min(rivals, key=lambda other: self.table[other].step_seconds, default=None)
        ratio = figures.step_seconds / self.table[best].step_seconds if best else 0.0
        return SLOW.format(name, ratio, best) if ratio > MAX_SLOWNESS else ""

    def _finalists(self) -> list[str]:
        """The fastest engines if they are close. The best one is last, since it will probably be used."""
        speeds = {name: expected_speed(row) for name, row in self.table.items() if row.is_candidate}
        order = sorted(speeds, key=lambda name: speeds[name])
        return [name for name in order[-2:] if speeds[order[-1]] <= CLOSE * speeds[name]]

    def _further_turn(self, name: str) -> None:
        """Measure an engine again, after another one. It may not be possible to install it again."""
        self._say(name, "measuring again")
        figures, engine = self.table[name], self.seat.engines[name]
        if not figures.is_candidate:
            return
        engine.set_threads(figures.threads)
        if failure := self.seat.install(name, self.tested_counts, self.report):
            self.table[name] = replace(figures, problem=FAILED.format(failure), failed=True)
            return
        engine.set_threads(figures.threads)
        self.table[name] = self._measured(name, figures, self.meter.probe(self.model))

    def _measured(self, name: str, figures: EngineFigures, probe: ForwardProbe) -> EngineFigures:
        """The figures with the shortest times of all turns so far: other load on the machine only makes them longer."""
        widths = [width for width in (1, *COMPARED_WIDTHS) if width <= probe.max_width]
        self._say(name, "measuring verify passes")
        samples = self._samples[name]
        for width, seconds in width_seconds(probe, widths, self.meter.clock, repeats=REPEATS).items():
            samples[width] = min(samples.get(width, inf), median(seconds))
        step = samples[1]
        # Noise can make a wider pass look faster than a decode step, but a verify pass cannot save time.
        costs = tuple((width, max(1.0, samples[width] / step)) for width in widths if width > 1 and step)
        return replace(figures, step_seconds=step, costs=costs)

    def _say(self, name: str, what: str) -> None:
        self.report(f"engine {name}: {what}")
