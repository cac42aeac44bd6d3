"""Engine: choose how the loaded models are computed, with how many threads, and report what is guaranteed.

The engines are the rows of LAYER_ENGINES. `auto` measures those that compute the loaded number format on this machine
(`engine_trials`) and chooses by these figures (`engine_choice`). Results are kept for the next start.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.distributed import broadcast
from utils.engine import threads
from utils.engine.engine_choice import Choice, FasterEngine, choose, faster_baseline
from utils.engine.engine_selection import EngineSelection
from utils.engine.engine_state import EngineState
from utils.engine.engine_table import LAYER_ENGINES
from utils.engine.forward_timing import REPEATS, ForwardProbe, times_have_changed, verify_costs
from utils.engine.layer_engine import Report, unreported
from utils.engine.openvino_engine import OpenVinoEngine
from utils.engine.seat import PLAIN, Seat
from utils.engine.stored_engine import StoredEngine
from utils.engine.stored_results import ResultFile, StoredResult
from utils.engine.weight_format import EngineWeights
from utils.engine.weight_memory import weight_format
from utils.errors import UserError
from utils.freed_memory import release_memory

AS_LOADED = EngineWeights()
AUTO = "auto"
INTERRUPTED = "its preparation was interrupted"


class Engine:
    """The models of a pair and the engine that computes them.

    models: the target, then the drafter if there is one. helpers: modules that are computed the same way but not
    tested, such as a draft head. weights: the format in which linear weights are computed; a format other than the
    loaded one cannot be undone. Raises UserError if it is not possible.

    selection: the candidates and their measurements. report: shows how far a slow step has got.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        *,
        helpers: Sequence[nn.Module] = (),
        weights: EngineWeights = AS_LOADED,
    ) -> None:
        self._target = models[0]
        self.report: Report = unreported
        self._weights = weights
        form = weight_format(self._target) if weights.as_loaded else weights.format
        self._seat = Seat({name: row.build(models, helpers, weights) for name, row in LAYER_ENGINES.items()})
        self.selection = EngineSelection(self._seat, self._target, form)
        self.step_seconds = 0.0  # of a decode step
        self.costs: tuple[float, ...] = ()  # extra time of verify passes with 1, 2, ... drafts, in decode steps
        self.draft_seconds: dict[str, float] = {}  # of one draft, by whatever the caller distinguishes
        self.has_stored_costs = False  # whether the costs were measured at an earlier start
        self._stored = StoredEngine([*models, *helpers], form)
        self.state = EngineState(PLAIN, weight_format(self._target), False, torch.get_num_threads(), "not tested")
        # Reported now, because a request for another format has no plain engine to fall back to.
        if not self.selection.candidates():
            raise UserError(f"{form} engine weights are not possible: {self._problems()}. Omit --engine-weights.")

    @property
    def results(self) -> ResultFile | None:
        """Where results of the self-test and costs are stored and found again. None: nowhere."""
        return self._stored.file

    @results.setter
    def results(self, file: ResultFile | None) -> None:
        self._stored.file = file
        for engine in self._seat.engines.values():
            if isinstance(engine, OpenVinoEngine):  # the only one that stores converted weights
                engine.folder = None if file is None else file.path.parent / "openvino"

    def use(self, name: str, thread_count: int) -> EngineState:
        """Compute with an engine ("auto" or a name in LAYER_ENGINES) and a number of threads.

        0 threads: see set_threads.

        Raises UserError if the engine cannot compute these models, or if `plain` is requested after weights were
        converted to another format; the models are then computed as before. Raises UserError if the engine fails its
        self-test; the models then stay plain, as after Ctrl-C.
        """
        self._check(name)
        if self.state.kind == PLAIN and self._restore(name, thread_count):
            return self.state
        return self._prepare(name, thread_count)

    def test(self, name: str, thread_count: int) -> EngineState:
        """Like `use`, but test and measure everything again, whatever is stored. Raises UserError as `use` does."""
        self._check(name)
        self._stored.drop(name, thread_count)
        self._seat.forget_tests()
        self._use_plain(self.state.reason)
        self.selection.table = {}
        # Not `use`: a file that cannot be written keeps its results.
        return self._prepare(name, thread_count, tests_all=True)

    def set_threads(self, count: int) -> EngineState:
        """Compute with `count` threads from now on.

        0 means what the environment asks for, otherwise the fastest number.
        """
        with threads.restored_on_error():
            chosen = count or threads.requested_threads() or self.selection.fastest_count(self.report)
            self._seat.engine.set_threads(chosen)
            self.measure()
            self._record_threads(chosen)
        return self.state

    def measure(self, probe: ForwardProbe | None = None, *, repeats: int = REPEATS) -> None:
        """Measure decode steps and verify passes, with a given probe or a new one.

        Every rank uses the times of rank zero.
        """
        # Adaptive gamma reads these times. Ranks that chose different verify widths would wait for each other forever.
        probe = probe or ForwardProbe(self._target)
        self.step_seconds, self.costs = broadcast(verify_costs(probe, repeats=repeats, report=self.report))
        self.draft_seconds, self.has_stored_costs = {}, False

    def costs_are_stale(self) -> bool:
        """Return whether a decode step and a verify pass now take clearly different times from the measured ones.

        The machine may have been busy when they were measured.
        """
        changed = times_have_changed(ForwardProbe(self._target), self.step_seconds, self.costs)
        return bool(broadcast(changed))  # ranks that decided differently would wait for each other

    def nbytes(self) -> int:
        """Return the bytes of the weights of all models as they are held now."""
        return self._seat.engine.nbytes()

    def faster_baseline(self) -> FasterEngine | None:
        """Return another engine in which the target alone would be noticeably faster, if one was measured."""
        return faster_baseline(self.selection.table, self.state.kind)

    def figures(self) -> dict[str, Any]:
        """Return the fields for a record."""
        other, table = self.faster_baseline(), self.selection.table
        return self.state.figures() | {
            "table": {name: row.record() for name, row in table.items()},
            "faster_baseline": None if other is None else asdict(other),
        }

    def store(self) -> None:
        """Store what was tested and measured for the next start. Does nothing without a file."""
        state = self.state
        self._stored.put(
            StoredResult(
                kind=state.kind,
                reason=state.reason,
                tested_on=self._stored.tested_on,
                tested_counts=tuple(sorted(self._seat.tested_counts())),
                threads=state.threads,
                layouts=dict(self._seat.engine.layouts),
                step_seconds=self.step_seconds,
                costs=self.costs,
                draft_seconds=self.draft_seconds,
                table=self.selection.table,
            )
        )

    def _restore(self, name: str, thread_count: int) -> bool:
        """Use a stored result. Returns False if there is none, or one that does not hold any more."""
        stored = self._stored.get(name, thread_count)
        if stored is None or stored.kind not in self.selection.candidates() or name not in (AUTO, stored.kind):
            return False
        if name == AUTO and stored.table and choose(stored.table, self.selection.workload).name != stored.kind:
            self.selection.table = dict(stored.table)  # other strategies are enabled now: choose anew, measure nothing
            return False
        engine = self._seat.engines[stored.kind]
        with threads.restored_on_error():
            engine.set_threads(stored.threads)
            try:
                failure = self._seat.install_tested(stored.kind, stored.layouts, set(stored.tested_counts))
            except KeyboardInterrupt:
                self._use_plain(INTERRUPTED)
                raise
        if failure:
            return False
        self.step_seconds, self.costs, self.has_stored_costs = stored.step_seconds, stored.costs, True
        self.draft_seconds, self.selection.table = dict(stored.draft_seconds), dict(stored.table)
        self.state = EngineState(
            kind=stored.kind,
            weights=engine.weights,
            verified=self._seat.is_verified(stored.threads),
            threads=stored.threads,
            reason=stored.reason,
            tested_on=stored.tested_on if engine.promise else "",
        )
        release_memory()
        return True

    def _problems(self) -> str:
        """Why no engine other than the plain one can compute these models."""
        problems = {name: self.selection.problem(name) for name in self._seat.engines if name != PLAIN}
        shared = set(problems.values())
        return shared.pop() if len(shared) == 1 else "; ".join(f"{name}: {text}" for name, text in problems.items())

    def _check(self, name: str) -> None:
        """Refuse an engine that cannot compute these models."""
        if name == PLAIN and not self._weights.as_loaded:
            raise UserError(
                f"The plain engine has no {self._weights.format} weights: start the program without --engine-weights."
            )
        if name != AUTO and (reason := self.selection.problem(name)):
            raise UserError(f"The {name} engine cannot compute {self._target.name_or_path}: {reason}.")

    def _prepare(self, name: str, thread_count: int, *, tests_all: bool = False) -> EngineState:
        """Choose, test and measure, whatever is stored. tests_all: whether to test every candidate."""
        self._stored.begin(name, thread_count)
        try:
            with threads.restored_on_error():
                choice = self._installed(name, thread_count, tests_all=tests_all)
                self.state = replace(
                    self.state, kind=choice.name, weights=self._seat.engine.weights, reason=choice.reason, tested_on=""
                )
                self.set_threads(torch.get_num_threads())  # which was chosen for the kernels of this engine
        except KeyboardInterrupt:
            self._use_plain(INTERRUPTED)
            raise
        release_memory()  # the original weights, which kernels have replaced
        self.store()
        return self.state

    def _installed(self, name: str, thread_count: int, *, tests_all: bool) -> Choice:
        """Install an engine. If it fails, the models stay plain."""
        try:
            if name == AUTO:
                return self.selection.install_best(thread_count, self.report, tests_all=tests_all)
            return self.selection.install(name, thread_count, self.report)
        except UserError as error:
            self._use_plain(str(error))
            remedy = "use /engine plain" if self._weights.as_loaded else "start without --engine-weights"
            raise UserError(f"{error} Instead, {remedy}.") from error

    def _record_threads(self, count: int) -> None:
        """Record the number of threads, after testing a number that has not been tested.

        The guarantee holds only for tested numbers.
        """
        reason = self.state.reason
        if self._seat.engine.promise:
            reason = self._seat.test_threads(count, self.report)
        self.state = replace(self.state, threads=count, verified=self._seat.is_verified(count), reason=reason)

    def _use_plain(self, reason: str) -> None:
        self._seat.remove()
        self.step_seconds, self.costs = 0.0, ()  # they were those of another engine
        self.state = replace(self.state, kind=PLAIN, verified=False, reason=reason, tested_on="")
