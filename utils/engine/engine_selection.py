"""EngineSelection: which engines can compute the loaded models, and the installation of the chosen one."""

from collections.abc import Callable
from dataclasses import replace

import psutil
import torch
from transformers import PreTrainedModel

from utils.engine import threads
from utils.engine.engine_choice import NO_PROMISE, TYPICAL, Choice, choose
from utils.engine.engine_figures import EngineFigures
from utils.engine.engine_trials import FAILED, Meter, Trials
from utils.engine.forward_timing import ForwardProbe
from utils.engine.layer_engine import Report, unreported
from utils.engine.seat import Seat
from utils.errors import UserError


class EngineSelection:
    """The engines in a seat as candidates for a target. weights: the loaded number format, the only one compared.

    table: the figures of the engines that were compared, and why the others were not; empty before `install_best`.
    workload: which engine is the best depends on what it will do.
    """

    def __init__(self, seat: Seat, target: PreTrainedModel, weights: str) -> None:
        self.meter, self.workload = Meter(), TYPICAL
        self.memory: Callable[[], int] = lambda: int(psutil.virtual_memory().available)  # bytes, for trials
        self.table: dict[str, EngineFigures] = {}
        self._seat, self._target, self._format = seat, target, weights

    @property
    def names(self) -> list[str]:
        """The names of all engines."""
        return [*self._seat.engines]

    def candidates(self) -> list[str]:
        """Return the names of the engines that support the models and compute the loaded number format."""
        return [name for name in self._seat.engines if not self.problem(name)]

    def problem(self, name: str) -> str:
        """Return why an engine cannot compute these models in the loaded number format."""
        engine = self._seat.engines[name]
        if reason := engine.unsupported():
            return reason
        return "" if engine.weights == self._format else f"it computes {engine.weights}, not {self._format}"

    def install(self, name: str, thread_count: int, report: Report = unreported) -> Choice:
        """Install an engine that was asked for, and test it. Raises UserError if its self-test fails.

        thread_count: see Engine.set_threads.
        """
        failure = self._seat.install(name, threads.usual_counts(), report) or self._test(thread_count, report)
        if failure:
            raise UserError(f"The {name} engine failed its self-test: {failure}.")
        return Choice(name, "" if self._seat.engine.promise else NO_PROMISE)

    def install_best(self, thread_count: int, report: Report = unreported, *, tests_all: bool = False) -> Choice:
        """Install the engine that the measurements favour, which are made now if there are none, and test it.

        tests_all: whether the other engines are tested too. Raises UserError if no engine is left.
        """
        self._seat.begin_trials(self.memory)
        try:
            if not self.table:
                self.table = self._measured(thread_count, report, tests_all=tests_all)
            while (choice := choose(self.table, self.workload)).name:
                row = self.table[choice.name]
                failure = self._installed(choice.name, thread_count, report)
                verified = not failure and self._seat.is_verified(torch.get_num_threads())
                problem = FAILED.format(failure) if failure else ""
                self.table[choice.name] = replace(row, problem=problem, failed=bool(failure), verified=verified)
                if not failure:
                    return choose(self.table, self.workload)
        finally:
            self._seat.end_trials()
        raise UserError(f"No engine computes {self._format} weights here: {choice.reason}.")

    def _installed(self, name: str, thread_count: int, report: Report) -> str:
        """Install the chosen engine, release the others and test it. Returns why that failed."""
        if row_threads := self.table[name].threads:
            self._seat.engines[name].set_threads(row_threads)  # compiled already
        failure = self._seat.install(name, threads.usual_counts(), report) or self._seat.end_trials()
        return failure or self._test(thread_count, report)

    def _test(self, thread_count: int, report: Report) -> str:
        """Test what the installed engine promises with the number of threads that it will use."""
        count = thread_count or threads.requested_threads() or self.fastest_count(report)
        self._seat.engine.set_threads(count)
        if self._seat.tested_counts():
            return ""  # another number of threads is no reason to give up an engine that works: `Engine` reports it
        failure = self._seat.test_threads(count, report)
        if failure:
            self._seat.discard()
        return failure

    def fastest_count(self, report: Report) -> int:
        """Return the fastest number of threads for the installed engine."""
        if (row := self.table.get(self._seat.name)) and row.threads:
            return row.threads
        report("choosing the number of threads")
        probe = ForwardProbe(self._target)
        counts, use = self._thread_counts(), self._seat.engine.set_threads
        return threads.fastest_count(lambda: probe.forward(1), counts, use)

    def _measured(self, thread_count: int, report: Report, *, tests_all: bool) -> dict[str, EngineFigures]:
        """The figures of all candidates, and the reasons against other engines. A single candidate is not measured."""
        names, engines = self.candidates(), self._seat.engines
        table = {
            name: EngineFigures(problem=self.problem(name), promise=engine.promise) for name, engine in engines.items()
        }
        if len(names) < 2:
            return table
        chosen = thread_count or threads.requested_threads()
        counts = [chosen] if chosen else self._thread_counts()
        trials = Trials(self._seat, self._target, counts, tests_all, report, self.meter, self.workload)
        return table | trials.run(names)

    def _thread_counts(self) -> list[int]:
        """The numbers of threads to choose from: on other devices than a CPU they hardly matter."""
        return threads.candidate_counts() if self._target.device.type == "cpu" else [torch.get_num_threads()]
