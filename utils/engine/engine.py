"""Engine: choose how the loaded models are computed, with how many threads, and report what is guaranteed.

The engines are the rows of LAYER_ENGINES. `auto` measures those that compute the loaded number format on a few layers
(`trials`) and chooses by these figures (`engine_choice`). The chosen engine alone is installed for whole models, once.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from threading import current_thread, main_thread
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.engine import machine, selftest
from utils.engine.cuda_graph import CudaGraphEngine
from utils.engine.engine_choice import (
    TYPICAL,
    Choice,
    EngineFigures,
    FasterEngine,
    choose,
    faster_baseline,
    joined_problems,
)
from utils.engine.forward_timing import (
    ForwardProbe,
    LongerContext,
    faster_threads,
    times_have_changed,
    verify_costs,
)
from utils.engine.invariant import InvariantEngine
from utils.engine.layer_engine import NO_PROMISE, Extent, PlainEngine, Report, install_with_fallback, unreported
from utils.engine.stored_results import ResultFile, StoredResult, result_key
from utils.engine.trials import FAILED, PLAIN, Meter, Trials, failed_figures, reason_of
from utils.engine.weight_format import NOT_POSSIBLE, EngineWeights, memory_problem, smaller_form, weight_format
from utils.errors import UserError
from utils.freed_memory import available_memory, release_memory

# A new engine needs a row here and its name in `utils.bounds.ENGINES`.
LAYER_ENGINES: dict[str, type[PlainEngine]] = {
    PLAIN: PlainEngine,
    "invariant": InvariantEngine,
    "cuda_graph": CudaGraphEngine,
}
AS_LOADED = EngineWeights()
AUTO = "auto"
NOT_TESTED = "not tested"
INTERRUPTED = "its preparation was interrupted"


@dataclass(frozen=True, slots=True)
class EngineState:
    """How the models are computed at the moment, as screens and records state it.

    kind: "plain" or a name in LAYER_ENGINES. weights: the number format of the linear weights. verified: whether the
    self-test passed with this number of threads. reason: why it did not, or why the engine is plain. tested_on: the day
    of the self-test, if only a slice was tested again at this start; otherwise empty.
    """

    kind: str
    weights: str
    verified: bool
    threads: int
    reason: str = ""
    tested_on: str = ""

    def sentence(self) -> str:
        """Return one line for the screen."""
        plural = "s" if self.threads > 1 else ""
        when = f" on {self.tested_on}, a slice rechecked now" if self.tested_on else ""
        guarantee = f"verified{when}" if self.verified else f"not guaranteed ({self.reason})"
        return f"{self.kind}, {self.weights} weights, {self.threads} thread{plural}; bit-identical: {guarantee}"


class Engine:
    """The models of a pair and the engine that computes them.

    models: the target, then the drafter if there is one. helpers: modules that are computed the same way but not
    tested, such as a draft head. weights: the format in which linear weights are computed; a format other than the
    loaded one cannot be undone. identity: of the files of all models, for results that are stored; empty to store
    nothing. Raises UserError if the format is not possible.

    problems: why engines cannot compute these models in the loaded number format, by their names; empty for those that
    can. table: the figures of the engines that were compared, and why others were not. workload: what the engines are
    compared for. report: shows how far a slow step has got. results: where results are stored and found again.
    available: returns the bytes of memory that are free. defers_costs: whether the caller calls `measure` itself, after
    an engine was chosen.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        *,
        helpers: Sequence[nn.Module] = (),
        weights: EngineWeights = AS_LOADED,
        identity: str = "",
    ) -> None:
        self._models, self._helpers, self._weights = list(models), list(helpers), weights
        self._target, self.identity = models[0], identity
        self.format = weight_format(self._target) if weights.as_loaded else weights.format
        self.report: Report = unreported
        self.results: ResultFile | None = None
        self.available: Callable[[], int] = available_memory
        self.defers_costs = False
        self.meter, self.workload = Meter(), TYPICAL
        self.table: dict[str, EngineFigures] = {}
        self._engine = self._built(PLAIN)
        self._held = self._engine.nbytes()  # without an engine
        # Found out now: the layers of an installed engine could not be read.
        self.problems = {name: self._built(name).unsupported() for name in LAYER_ENGINES}
        self._references: list[selftest.Reference] = []
        self._key = ""  # of the present result
        self.step_seconds = 0.0  # of a decode step
        self.costs: Sequence[float] = ()  # extra time of verify passes with 1, 2, ... drafts, in decode steps
        self.longer: LongerContext | None = None  # the same in a longer context
        self.draft_seconds: dict[str, Sequence[float]] = {}  # of drafters, by whatever the caller distinguishes
        self.has_stored_costs = False  # whether the costs were measured at an earlier start
        self.state = EngineState(PLAIN, weight_format(self._target), False, torch.get_num_threads(), NOT_TESTED)
        # Reported now, because a request for another format has no plain engine to fall back to.
        if not self.candidates():
            reason = joined_problems({name: problem for name, problem in self.problems.items() if name != PLAIN})
            raise UserError(NOT_POSSIBLE.format(self.format, reason))

    def candidates(self) -> list[str]:
        """Return the names of the engines that support the models and compute the loaded number format."""
        return [name for name, problem in self.problems.items() if not problem]

    def use(self, name: str, thread_count: int) -> EngineState:
        """Compute with an engine ("auto" or a name in LAYER_ENGINES) and a number of threads.

        0 threads: what the environment asks for, otherwise the fastest number.

        Raises UserError if the engine cannot compute these models, if memory does not suffice, or if `plain` is
        requested after weights were converted to another format; the models are then computed as before. Raises
        UserError if the engine fails its self-test; the models then stay plain, as after Ctrl-C.
        """
        self._check(name)
        return self._prepare(name, thread_count, self._stored(name, thread_count))

    def test(self, name: str, thread_count: int) -> EngineState:
        """Like `use`, but test and measure everything again, whatever is stored. Raises UserError as `use` does."""
        self._check(name)
        if self.results is not None and (key := self._key_of(name, thread_count)):
            self.results.put(key, {})  # a failure leaves none behind
        self.table = {}
        return self._prepare(name, thread_count, None, "complete")

    def measure(self) -> None:
        """Measure decode steps and verify passes in a short and in a longer context."""
        probe = ForwardProbe(self._target)
        self.step_seconds, self.costs = verify_costs(probe, report=self.report)
        self.longer, short = None, probe.length
        release_memory()  # caches of keys and values that the passes have left
        if self.costs and (longer := probe.longer()) is not None:
            found = verify_costs(longer, report=self.report, shorter=self.costs)
            self.longer = LongerContext(short, longer.length, *found)
        self.draft_seconds, self.has_stored_costs = {}, False

    def costs_are_stale(self) -> bool:
        """Return whether a decode step and a verify pass now take clearly different times from the measured ones.

        The machine may have been busy when they were measured.
        """
        return times_have_changed(ForwardProbe(self._target), self.step_seconds, self.costs)

    def nbytes(self) -> int:
        """Return the bytes of the weights of all models as they are held now."""
        return self._engine.nbytes()

    def faster_baseline(self) -> FasterEngine | None:
        """Return another engine in which the target alone would be noticeably faster, if one was measured."""
        return faster_baseline(self.table, self.state.kind)

    def figures(self) -> dict[str, Any]:
        """Return the fields for a record."""
        other = self.faster_baseline()
        return asdict(self.state) | {
            "table": {name: asdict(row) for name, row in self.table.items()},
            "faster_baseline": None if other is None else asdict(other),
        }

    def store(self) -> None:
        """Store what was tested and measured for the next start. Does nothing without a file, and nothing if an engine
        raised an error, whose reason may be gone by then.
        """
        state = self.state
        if self.results is None or not self._key or state.reason == INTERRUPTED:
            return
        if not any(row.raised for row in self.table.values()):
            tested_on = state.tested_on or date.today().isoformat()
            measured = (self.step_seconds, self.costs, self.longer, self.draft_seconds, self.table)
            result = StoredResult(state.kind, state.reason, state.threads, tested_on, *measured)
            self.results.put(self._key, asdict(result))

    def add_helper(self, helper: nn.Module) -> None:
        """Compute one more module in the same way, such as a second draft head."""
        self._helpers.append(helper)
        self._engine.compute([helper])

    def drop_helper(self, helper: nn.Module) -> None:
        """Forget a module that `add_helper` has added and that is not used any more."""
        self._helpers.remove(helper)

    def _built(self, name: str) -> PlainEngine:
        return LAYER_ENGINES[name](self._models, self._helpers, self._weights)

    def _key_of(self, name: str, thread_count: int) -> str:
        """The key under which results are stored. Empty if they are not stored."""
        if self.results is None or not self.identity:
            return ""
        return result_key(self.identity, weights=self.format, engine=name, threads=thread_count)

    def _stored(self, name: str, thread_count: int) -> StoredResult | None:
        """A result of an earlier start that still holds."""
        key = self._key_of(name, thread_count)
        stored = None if self.results is None or not key else self.results.result(key)
        if stored is None or not stored.step_seconds or stored.kind not in self.candidates():
            return None
        if name == AUTO and stored.table and choose(stored.table, self.workload).name != stored.kind:
            self.table = dict(stored.table)  # choose anew, measure nothing
            return None
        return stored

    def _check(self, name: str) -> None:
        """Refuse an engine that cannot compute these models, or for which memory does not suffice."""
        if name == PLAIN and not self._weights.as_loaded:
            raise UserError(
                f"The plain engine has no {self._weights.format} weights: start the program without --engine-weights."
            )
        if name != AUTO and (reason := self.problems[name]):
            raise UserError(f"The {name} engine cannot compute {self._target.name_or_path}: {reason}.")
        names = self.candidates() if name == AUTO else [name]
        lacking = {candidate: self._memory_problem(candidate) for candidate in names}
        if all(lacking.values()):
            least = min(names, key=lambda candidate: self._built(candidate).need())
            remedy = smaller_form(self._models, self.available())
            raise UserError(f"{self._target.name_or_path} is not computed here: {lacking[least]}. {remedy}")

    def _memory_problem(self, name: str) -> str:
        """Why an engine does not fit into memory, if it does not."""
        freed = max(0, self._engine.nbytes() - self._held)  # by the engine that is in use now
        return memory_problem(self._models, self._built(name).need(), self.available() + freed, self._weights)

    def _prepare(
        self, name: str, thread_count: int, stored: StoredResult | None, extent: Extent = "first"
    ) -> EngineState:
        """Choose, install, test and measure, as far as no stored result holds."""
        self._key = self._key_of(name, thread_count)
        before = torch.get_num_threads()
        try:
            self._engine.remove()
            self._engine = self._built(PLAIN)
            if stored is None or not self._restored(stored, thread_count):
                self._use_best(name, thread_count, extent)
                if not self.defers_costs:
                    self.measure()
        except BaseException as error:
            torch.set_num_threads(before)
            self._use_plain(INTERRUPTED if isinstance(error, KeyboardInterrupt) else reason_of(error))
            if isinstance(error, UserError):
                as_loaded = self._weights.as_loaded and name != PLAIN
                remedy = "use /engine plain" if as_loaded else "start with other options"
                raise UserError(f"{error} Instead, {remedy}.") from error
            raise
        finally:
            self._references = []
            release_memory()  # what engines have replaced
        self.store()
        return self.state

    def _restored(self, stored: StoredResult, thread_count: int) -> bool:
        """Install the engine of a stored result and test a slice again. Returns False if it failed, or if the machine
        was so busy then that too few threads were chosen.
        """
        failed = self._install(stored.kind, stored.threads, "later")
        if failed or (not thread_count and self._enough_threads(stored.threads) != stored.threads):
            self._engine.remove()
            self._engine = self._built(PLAIN)
            self._references = []  # of less than a first start compares
            return False
        self.step_seconds, self.costs, self.longer = stored.step_seconds, stored.costs, stored.longer
        self.draft_seconds, self.table = dict(stored.draft_seconds), dict(stored.table)
        self.has_stored_costs = True
        self._set_state(stored.kind, stored.threads, stored.reason, stored.tested_on)
        return True

    def _enough_threads(self, count: int) -> int:
        """Return `count`, or a larger number of threads that is clearly faster on a CPU, unless one was requested."""
        more = [number for number in machine.candidate_threads() if number > count]
        if not more or machine.requested_threads() or self._target.device.type != "cpu":
            return count
        self.report("measuring with more threads")
        return faster_threads(ForwardProbe(self._target), count, more)

    def _use_best(self, name: str, thread_count: int, extent: Extent) -> None:
        """Install the best engine, or the requested one, and test it. Raises UserError if none is left."""
        known = thread_count or machine.requested_threads()
        names = self.candidates() if name == AUTO else [name]
        if not all(other in self.table for other in names):
            rows = {other: self._unmeasured(other, problem) for other, problem in self.problems.items()}
            self.table |= (rows if name == AUTO else {}) | self._measured(names, known)
        while True:
            choice = choose(self.table, self.workload) if name == AUTO else Choice(name)
            if not choice.name:
                raise UserError(f"No engine computes {self.format} weights here: {choice.reason}.")
            row = self.table[choice.name]
            count = known or row.threads or torch.get_num_threads()
            failed = self._install(choice.name, count, extent, may_add=not known)
            if failed is None:
                count = torch.get_num_threads()
                self.table[choice.name] = replace(row, verified=bool(self._engine.promise), threads=count)
                reason = "" if self._engine.promise else choice.reason or NO_PROMISE
                self._set_state(choice.name, count, reason)
                return
            self.table[choice.name] = failed
            if name != AUTO:
                reason = failed.problem.removeprefix(FAILED.format(""))
                raise UserError(f"The {name} engine failed its self-test: {reason}.")

    def _measured(self, names: Sequence[str], known: int) -> dict[str, EngineFigures]:
        """The figures of engines on a few layers. What does not fit into memory is not tried."""
        rows = {name: self._unmeasured(name, self._memory_problem(name)) for name in names}
        held = self._engine.nbytes()
        table = {name: replace(row, nbytes=held + self._built(name).need()) for name, row in rows.items()}
        tried = {name: LAYER_ENGINES[name] for name, row in table.items() if row.is_candidate}
        # On other devices than a CPU the number of threads hardly matters.
        on_cpu = self._target.device.type == "cpu"
        counts = [known] if known else machine.candidate_threads() if on_cpu else [torch.get_num_threads()]
        if len(tried) < 2 and len(counts) < 2:
            return table
        settings = self.report, self.meter, self.workload
        figures = Trials(self._target, tried, self._weights, counts, *settings).run()
        release_memory()  # the few layers of all engines
        return table | {name: replace(row, nbytes=table[name].nbytes) for name, row in figures.items()}

    def _unmeasured(self, name: str, problem: str) -> EngineFigures:
        return EngineFigures(problem, promise=LAYER_ENGINES[name].promise)

    def _install(self, name: str, count: int, extent: Extent, *, may_add: bool = False) -> EngineFigures | None:
        """Install an engine for whole models and test it. Returns a row that says why that failed, if it did; then no
        engine is installed. may_add: use more threads if they are clearly faster, since trials may have been disturbed.
        """
        engine, row = self._built(name), self.table.get(name, self._unmeasured(name, ""))
        try:
            if name != PLAIN:
                self._add_references(passed=extent == "later")
            torch.set_num_threads(count)
            self.report(f"engine {name}: installing")
            failure = install_with_fallback(engine, lambda text: self.report(f"engine {name}: {text}"), self._differs)
            if may_add and not failure:
                torch.set_num_threads(count := self._enough_threads(count))
            failure = failure or engine.self_test(count, self.report, extent)
            failed = replace(row, problem=FAILED.format(failure)) if failure else None
        # Whatever the code of an engine or of a model raises is a reason to use another engine, not to crash.
        except Exception as error:
            if name == PLAIN:
                raise
            failed = failed_figures(error, row)
        except BaseException:
            with _uninterrupted():
                engine.remove()
            raise
        release_memory()  # caches of keys and values of the test
        if failed is not None:
            engine.remove()
        else:
            self._engine = engine
        return failed

    def _add_references(self, *, passed: bool) -> None:
        """Compute the logits of models with weights of their own that are not known yet."""
        for model in selftest.own_models(self._models):
            if not any(model is reference.model for reference in self._references):
                weights = self._weights if model is self._target else self._weights.for_drafter()
                self._references.append(selftest.Reference.of(model, weights, passed=passed))
                release_memory()  # the layers that they were computed with

    def _differs(self) -> str:
        """How logits of the first layers differ from those of transformers."""
        return next(filter(None, (reference.difference() for reference in self._references)), "")

    def _set_state(self, kind: str, count: int, reason: str, tested_on: str = "") -> None:
        verified = bool(self._engine.promise)
        self.state = EngineState(kind, self.format, verified, count, reason, tested_on if verified else "")

    def _use_plain(self, reason: str) -> None:
        with _uninterrupted():
            self._engine.remove()
            self._engine = self._built(PLAIN)
            self.step_seconds, self.costs, self.longer = 0.0, (), None  # they were those of another engine
            weights = weight_format(self._target)
            self.state = EngineState(PLAIN, weights, False, torch.get_num_threads(), reason)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in the block, which puts layers back."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that was not set by Python
            signal.signal(signal.SIGINT, before)
