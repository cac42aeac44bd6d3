"""Engine: choose how the loaded models are computed, with how many threads, and report what is guaranteed.

The engines are the rows of LAYER_ENGINES. `auto` measures those that compute the loaded number format on a few layers
(`trials`) and chooses by these figures (`engine_choice`). The chosen engine alone is installed for whole models, once.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from threading import current_thread, main_thread
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.engine import selftest, threads
from utils.engine.engine_choice import TYPICAL, Choice, EngineFigures, FasterEngine, choose, faster_baseline
from utils.engine.engine_table import LAYER_ENGINES
from utils.engine.fingerprint import result_key
from utils.engine.forward_timing import REPEATS, ForwardProbe, LongerContext, times_have_changed, verify_costs
from utils.engine.layer_engine import NO_PROMISE, LayerEngine, Report, unreported
from utils.engine.stored_results import ResultFile, StoredResult
from utils.engine.trials import FAILED, PLAIN, Meter, Trials, install_compared, reason_of
from utils.engine.weight_format import EngineWeights, memory_problem, smaller_form, unread_bytes, weight_format
from utils.errors import UserError
from utils.freed_memory import available_memory, release_memory

AS_LOADED = EngineWeights()
AUTO = "auto"
NOT_TESTED = "not tested"
INTERRUPTED = "its preparation was interrupted"


@dataclass(frozen=True, slots=True)
class EngineState:
    """How the models are computed at the moment, as screens and records state it.

    kind: "plain" or a name in LAYER_ENGINES. weights: the number format of the linear weights. verified: whether the
    self-test passed with this number of threads. reason: why it did not, or why the engine is plain. tested_on: the day
    of the self-test, if only one verify width was tested again at this start; otherwise empty.
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
        when = f" on {self.tested_on}, one verify width rechecked now" if self.tested_on else ""
        guarantee = f"verified{when}" if self.verified else f"not guaranteed ({self.reason})"
        # `make gpu-check` is how to change that.
        untried = "; this engine has never been run on a GPU" if self.kind == "cuda_graph" else ""
        return (
            f"{self.kind}, {self.weights} weights, {self.threads} thread{plural}; bit-identical: {guarantee}{untried}"
        )

    def figures(self) -> dict[str, Any]:
        """Return the fields for a record."""
        return asdict(self)


class Engine:
    """The models of a pair and the engine that computes them.

    models: the target, then the drafter if there is one. helpers: modules that are computed the same way but not
    tested, such as a draft head. weights: the format in which linear weights are computed; a format other than the
    loaded one cannot be undone. identity: of the files of all models, for results that are stored; empty to store
    nothing. Raises UserError if the format is not possible.

    table: the figures of the engines that were compared, and why others were not. workload: what the engines are
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
        self._engine: LayerEngine = self._built(PLAIN)
        self._held = self._engine.nbytes()  # without an engine
        # Found out now: the layers of an installed engine could not be read.
        self._problems = {name: self._problem(name) for name in LAYER_ENGINES}
        self._tested: dict[str, set[int]] = {}  # numbers of threads with which each engine's self-test passed
        self._references: list[tuple[PreTrainedModel, selftest.Reference]] = []
        self._key, self._tested_on = "", ""  # of the present result
        self.step_seconds = 0.0  # of a decode step
        self.costs: tuple[float, ...] = ()  # extra time of verify passes with 1, 2, ... drafts, in decode steps
        self.longer: LongerContext | None = None  # the same in a longer context
        self.draft_seconds: dict[str, list[float]] = {}  # of drafters, by whatever the caller distinguishes
        self.has_stored_costs = False  # whether the costs were measured at an earlier start
        self.state = EngineState(PLAIN, weight_format(self._target), False, torch.get_num_threads(), NOT_TESTED)
        # Reported now, because a request for another format has no plain engine to fall back to.
        if not self.candidates():
            reason = self._shared_problem()
            raise UserError(f"{self.format} engine weights are not possible: {reason}. Omit --engine-weights.")

    @property
    def names(self) -> list[str]:
        """The names of all engines."""
        return [*LAYER_ENGINES]

    def candidates(self) -> list[str]:
        """Return the names of the engines that support the models and compute the loaded number format."""
        return [name for name in LAYER_ENGINES if not self.problem(name)]

    def problem(self, name: str) -> str:
        """Return why an engine cannot compute these models in the loaded number format."""
        return self._problems[name]

    def need(self, name: str) -> int:
        """Return the bytes of memory that an engine takes beyond what the models hold without any."""
        return self._built(name).need()

    def use(self, name: str, thread_count: int) -> EngineState:
        """Compute with an engine ("auto" or a name in LAYER_ENGINES) and a number of threads.

        0 threads: what the environment asks for, otherwise the fastest number.

        Raises UserError if the engine cannot compute these models, if memory does not suffice, or if `plain` is
        requested after weights were converted to another format; the models are then computed as before. Raises
        UserError if the engine fails its self-test; the models then stay plain, as after Ctrl-C.
        """
        self._check(name)
        stored = self._stored(name, thread_count)
        return self._prepare(name, thread_count, stored)

    def test(self, name: str, thread_count: int) -> EngineState:
        """Like `use`, but test and measure everything again, whatever is stored. Raises UserError as `use` does."""
        self._check(name)
        if self.results is not None and (key := self._key_of(name, thread_count)):
            self.results.drop(key)
        self.table, self._tested = {}, {}
        return self._prepare(name, thread_count, None, complete=True)

    def measure(self, probe: ForwardProbe | None = None, *, repeats: int = REPEATS) -> None:
        """Measure decode steps and verify passes in a short and in a longer context. probe: a new one if None."""
        probe = probe or ForwardProbe(self._target)
        self.step_seconds, self.costs = verify_costs(probe, repeats=repeats, report=self.report)
        self.longer, short = None, probe.length
        release_memory()  # caches of keys and values that the passes have left
        if self.costs and (longer := probe.longer()) is not None:
            found = verify_costs(longer, repeats=repeats, report=self.report, shorter=self.costs)
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

    def unread_bytes(self, model: nn.Module, *, besides: nn.Module | None = None) -> int:
        """Return the bytes of the weights of a model that no tensor of it holds, in the format in use."""
        started = self.state.kind != PLAIN or self.state.reason == NOT_TESTED
        return unread_bytes(model, self._weights if started else AS_LOADED, besides=besides)

    def faster_baseline(self) -> FasterEngine | None:
        """Return another engine in which the target alone would be noticeably faster, if one was measured."""
        return faster_baseline(self.table, self.state.kind)

    def figures(self) -> dict[str, Any]:
        """Return the fields for a record."""
        other = self.faster_baseline()
        return self.state.figures() | {
            "table": {name: row.record() for name, row in self.table.items()},
            "faster_baseline": None if other is None else asdict(other),
        }

    def store(self) -> None:
        """Store what was tested and measured for the next start. Does nothing without a file."""
        if self.results is None or not self._key or self.state.reason == INTERRUPTED:
            return
        state = self.state
        result = StoredResult(
            kind=state.kind,
            reason=state.reason,
            tested_on=self._tested_on,
            tested_counts=tuple(sorted(self._tested.get(state.kind, ()))),
            threads=state.threads,
            step_seconds=self.step_seconds,
            costs=self.costs,
            longer=self.longer,
            draft_seconds=self.draft_seconds,
            table=self.table,
        )
        self.results.put(self._key, result)

    def _built(self, name: str) -> LayerEngine:
        return LAYER_ENGINES[name].build(self._models, self._helpers, self._weights)

    def _key_of(self, name: str, thread_count: int) -> str:
        """The key under which results are stored. Empty if they are not stored."""
        if self.results is None or not self.identity:
            return ""
        return result_key(self.identity, weights=self.format, engine=name, threads=thread_count)

    def _stored(self, name: str, thread_count: int) -> StoredResult | None:
        """A result of an earlier start that still holds."""
        key = self._key_of(name, thread_count)
        stored = None if self.results is None or not key else self.results.get(key)
        if stored is None or stored.has_expired(date.today()) or not stored.step_seconds:
            return None
        if stored.kind not in self.candidates() or name not in (AUTO, stored.kind):
            return None
        if name == AUTO and stored.table and choose(stored.table, self.workload).name != stored.kind:
            self.table = dict(stored.table)  # choose anew, measure nothing
            return None
        return stored

    def _problem(self, name: str) -> str:
        engine = self._built(name)
        if reason := engine.unsupported():
            return reason
        return "" if engine.weights == self.format else f"it computes {engine.weights}, not {self.format}"

    def _shared_problem(self) -> str:
        """Why no engine other than the plain one can compute these models."""
        problems = {name: self.problem(name) for name in LAYER_ENGINES if name != PLAIN}
        shared = set(problems.values())
        return shared.pop() if len(shared) == 1 else "; ".join(f"{name}: {text}" for name, text in problems.items())

    def _check(self, name: str) -> None:
        """Refuse an engine that cannot compute these models, or for which memory does not suffice."""
        if name == PLAIN and not self._weights.as_loaded:
            raise UserError(
                f"The plain engine has no {self._weights.format} weights: start the program without --engine-weights."
            )
        if name != AUTO and (reason := self.problem(name)):
            raise UserError(f"The {name} engine cannot compute {self._target.name_or_path}: {reason}.")
        names = self.candidates() if name == AUTO else [name]
        lacking = {candidate: self._memory_problem(candidate) for candidate in names}
        if all(lacking.values()):
            remedy = smaller_form(self._models, self.available())
            raise UserError(f"{self._target.name_or_path} is not computed here: {lacking[names[0]]}. {remedy}")

    def _memory_problem(self, name: str) -> str:
        """Why an engine does not fit into memory, if it does not."""
        freed = max(0, self._engine.nbytes() - self._held)  # by the engine that is in use now
        return memory_problem(self._models, self.need(name), self.available() + freed)

    def _prepare(
        self, name: str, thread_count: int, stored: StoredResult | None, *, complete: bool = False
    ) -> EngineState:
        """Choose, install, test and measure, as far as no stored result holds."""
        self._key, self._tested_on = self._key_of(name, thread_count), date.today().isoformat()
        try:
            with threads.restored_on_error():
                self._engine.remove()
                self._engine = self._built(PLAIN)
                if stored is None or not self._restored(stored):
                    self._chosen(name, thread_count, complete=complete)
                    if not self.defers_costs:
                        self.measure()
        except KeyboardInterrupt:
            self._use_plain(INTERRUPTED)
            raise
        except UserError as error:
            self._use_plain(str(error))
            remedy = "use /engine plain" if self._weights.as_loaded and name != PLAIN else "start with other options"
            raise UserError(f"{error} Instead, {remedy}.") from error
        except Exception as error:
            self._use_plain(reason_of(error))
            raise
        finally:
            self._references = []
            release_memory()  # what engines have replaced
        self.store()
        return self.state

    def _restored(self, stored: StoredResult) -> bool:
        """Install the engine of a stored result and test one verify width. Returns False if it failed."""
        if self._install(stored.kind, stored.threads, self._one_width):
            return False
        self._tested[stored.kind] = set(stored.tested_counts)
        self.step_seconds, self.costs, self.has_stored_costs = stored.step_seconds, stored.costs, True
        self.longer = stored.longer
        self.draft_seconds, self.table = dict(stored.draft_seconds), dict(stored.table)
        self._tested_on = stored.tested_on
        self._set_state(stored.kind, stored.threads, stored.reason, tested_on=stored.tested_on)
        return True

    def _chosen(self, name: str, thread_count: int, *, complete: bool) -> None:
        """Install the best engine, or the one that was asked for, and test it. Raises UserError if none is left."""
        known = thread_count or threads.requested_threads() or 0
        rows = {other: self._unmeasured(other, self.problem(other)) for other in LAYER_ENGINES} if name == AUTO else {}
        names = [other for other in rows if not rows[other].problem] if name == AUTO else [name]
        if not all(other in self.table for other in names):
            self.table |= rows | self._measured(names, known)
        while True:
            row = {other: self.table.get(other, EngineFigures()) for other in rows or names}
            choice = choose(row, self.workload) if name == AUTO else Choice(name)
            if not choice.name:
                raise UserError(f"No engine computes {self.format} weights here: {choice.reason}.")
            count = known or row[choice.name].threads or torch.get_num_threads()
            failure = self._install(choice.name, count, partial(self._self_test, choice.name, count, complete))
            self._note_test(choice.name, failure)
            if not failure:
                reason = choice.reason if name == AUTO else "" if self._engine.promise else NO_PROMISE
                self._set_state(choice.name, count, reason)
                return
            if name != AUTO:
                raise UserError(f"The {name} engine failed its self-test: {failure}.")

    def _note_test(self, name: str, failure: str) -> None:
        row = replace(self.table.get(name, EngineFigures()), verified=not failure and bool(self._engine.promise))
        self.table[name] = replace(row, problem=FAILED.format(failure), failed=True) if failure else row
        if failure:  # those that were given up because they are slower are candidates again
            given_up = {other for other, row in self.table.items() if row.step_seconds and not row.failed}
            self.table |= {other: replace(self.table[other], problem="") for other in given_up}

    def _measured(self, names: Sequence[str], known: int) -> dict[str, EngineFigures]:
        """The figures of engines on a few layers. What does not fit into memory is not tried."""
        table = {name: self._unmeasured(name, self._memory_problem(name)) for name in names}
        table = {name: replace(row, nbytes=self._engine.nbytes() + self.need(name)) for name, row in table.items()}
        tried = [name for name, row in table.items() if row.is_candidate]
        counts = [known] if known else self._thread_counts()
        if len(tried) < 2 and len(counts) < 2:
            return table
        builders = {name: LAYER_ENGINES[name].build for name in tried}
        trials = Trials(self._target, builders, self._weights, counts, self.report, self.meter)
        figures = trials.run()
        release_memory()  # the few layers of all engines
        if trials.reference is not None:
            self._references = [(self._target, trials.reference)]
        return table | {name: replace(row, nbytes=table[name].nbytes) for name, row in figures.items()}

    def _unmeasured(self, name: str, problem: str) -> EngineFigures:
        return EngineFigures(problem, promise=self._built(name).promise)

    def _thread_counts(self) -> list[int]:
        """The numbers of threads to choose from: on other devices than a CPU they hardly matter."""
        return threads.candidate_counts() if self._target.device.type == "cpu" else [torch.get_num_threads()]

    def _install(self, name: str, count: int, test: Callable[[LayerEngine], str]) -> str:
        """Install an engine for whole models and test it. Returns why that failed; then no engine is installed."""
        engine = self._built(name)
        try:
            if name != PLAIN:
                self._add_references()
            engine.set_threads(count)
            self.report(f"engine {name}: installing")
            install = partial(engine.install, lambda text: self.report(f"engine {name}: {text}"))
            if name == PLAIN:
                failure = install()
            else:
                failure = install_compared(engine, self._target, install, self._differs) or test(engine)
        # Whatever the code of an engine or of a model raises is a reason to use another engine, not to crash.
        except Exception as error:
            if name == PLAIN:
                raise
            failure = reason_of(error)
        except BaseException:
            with _uninterrupted():
                engine.remove()
            raise
        if failure:
            engine.remove()
        else:
            self._engine = engine
        return failure

    def _add_references(self) -> None:
        """Compute the logits of models with weights of their own that are not known yet."""
        known = [model for model, _ in self._references]
        own = [model for model in self._models[1:] if not _shares_weights(model, self._target)]
        for model in (self._target, *own):
            if not any(model is other for other in known):
                self._references.append((model, selftest.Reference.of(model, self._weights)))
                release_memory()  # the layers that they were computed with

    def _differs(self) -> str:
        """How logits of the first layers differ from those of transformers."""
        return next(filter(None, (reference.difference(model) for model, reference in self._references)), "")

    def _self_test(self, name: str, count: int, complete: bool, engine: LayerEngine) -> str:
        failure = engine.self_test(count, self.report, complete=complete)
        release_memory()  # its caches of keys and values
        if not failure:
            self._tested.setdefault(name, set()).add(count)
        return failure

    def _one_width(self, engine: LayerEngine) -> str:
        """Test one verify width of the target, another one on another day."""
        if not engine.promise:
            return ""
        widths = selftest.RECHECKED_WIDTHS
        return selftest.one_width_differs(self._target, widths[date.today().toordinal() % len(widths)])

    def _set_state(self, kind: str, count: int, reason: str, *, tested_on: str = "") -> None:
        engine = self._engine
        verified = bool(engine.promise) and count in self._tested.get(kind, ())
        self.state = EngineState(kind, engine.weights, verified, count, reason, tested_on if engine.promise else "")

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


def _shares_weights(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is target.get_input_embeddings().weight
