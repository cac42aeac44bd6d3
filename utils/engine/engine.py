"""Engine: choose how the loaded models are computed, with how many threads, and report what is guaranteed.

`plain` is PyTorch as it is. The other engines are the rows of LAYER_ENGINES. `auto` tries the first of them that
supports the models and is likely to be faster. If there is none, or its self-test fails, the models stay plain.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.distributed import broadcast, is_tensor_parallel
from utils.engine import threads
from utils.engine.engine_state import EngineState
from utils.engine.fingerprint import result_key
from utils.engine.forward_timing import REPEATS, ForwardProbe, verify_costs
from utils.engine.invariant import InvariantEngine, weight_format
from utils.engine.layer_engine import LayerEngine, Report, unreported
from utils.engine.selftest import WIDTHS
from utils.engine.stored_results import ResultFile, StoredResult
from utils.engine.weight_format import EngineWeights
from utils.errors import UserError
from utils.freed_memory import release_memory

AS_LOADED = EngineWeights()
LAYER_ENGINES = {"invariant": InvariantEngine}


class Engine:
    """The models of a pair and the engine that computes them.

    models: the target, then the drafter if there is one. helpers: modules that are computed the same way but not
    tested, such as a draft head. weights: the format in which linear weights are computed; a format other
    than the loaded one cannot be undone. Raises UserError if it is not possible.

    results: where results of the self-test and costs are stored and found again, None: nowhere. report: shows how far
    a slow step has got.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        *,
        helpers: Sequence[nn.Module] = (),
        weights: EngineWeights = AS_LOADED,
    ) -> None:
        self._target, self._parts = models[0], [*models, *helpers]
        self.results: ResultFile | None = None
        self.report: Report = unreported
        self._formats = weights
        self._layer_engines: dict[str, LayerEngine] = {
            name: build(models, helpers, weights) for name, build in LAYER_ENGINES.items()
        }
        self._tested_counts: set[int] = set()  # numbers of threads with which the self-test passed
        self.step_seconds = 0.0  # of a decode step
        self.costs: tuple[float, ...] = ()  # extra time of verify passes with 1, 2, ... drafts, in decode steps
        self.draft_seconds: dict[str, float] = {}  # of one draft, by whatever the caller distinguishes
        self._weights: str | None = None  # their fingerprint, computed before they are packed
        self._key: str | None = None  # of the stored result
        self.state = EngineState("plain", weight_format(self._target), False, torch.get_num_threads(), "not tested")
        # Reported now, because a request for another format has no plain engine to fall back to.
        if not weights.as_loaded:
            name, reason = self._choose("auto")
            if not name:
                raise UserError(f"{weights.format} engine weights are not possible: {reason}. Omit --engine-weights.")

    def use(self, name: str, thread_count: int) -> EngineState:
        """Compute with an engine ("plain", "auto" or a name in LAYER_ENGINES) and a number of threads.

        0 threads: see set_threads.

        Raises UserError if the engine cannot compute these models, or if `plain` is requested after weights were
        converted to another format. The models are then computed as before.
        """
        if name == "plain" and not self._formats.as_loaded:
            raise UserError(
                f"The plain engine has no {self._formats.format} weights: start the program without --engine-weights."
            )
        if self.state.kind == "plain" and self._restore(name, thread_count):
            return self.state
        return self._prepare(name, thread_count)

    def _prepare(self, name: str, thread_count: int) -> EngineState:
        """Choose, test and measure, whatever is stored."""
        chosen, reason = self._choose(name)
        if not chosen:
            self._use_plain(reason if name == "plain" else f"{name}: {reason}")
        # An engine that is installed already has passed its self-test; only the number of threads may change.
        elif self.state.kind != chosen:
            self._install(chosen, requested=name)
        # After the engine is installed, because the fastest number of threads depends on its kernels.
        self.set_threads(thread_count)
        release_memory()  # the original weights, which kernels have replaced
        self._key = self._key_of(name, thread_count)
        self.store()
        return self.state

    def test(self, name: str, thread_count: int) -> EngineState:
        """Like `use`, but test and measure everything again, whatever is stored. Raises UserError as `use` does."""
        if self.results is not None and (key := self._key_of(name, thread_count)):
            self.results.drop(key)
        if not self._formats.as_loaded:  # their layers stay, and are tested again
            self.state, self._tested_counts = replace(self.state, kind="plain", verified=False), set()
        else:
            self._use_plain(self.state.reason)
        return self._prepare(name, thread_count)  # not `use`: a file that cannot be written keeps its results

    def store(self) -> None:
        """Store what was tested and measured for the next start. Does nothing without a file."""
        if self.results is not None and self._key is not None:
            state, engine = self.state, self._layer_engines.get(self.state.kind)
            result = StoredResult(
                kind=state.kind,
                reason=state.reason,
                tested_on=state.tested_on or date.today().isoformat(),
                tested_counts=tuple(sorted(self._tested_counts)),
                threads=state.threads,
                layouts=engine.layouts if engine else {},
                step_seconds=self.step_seconds,
                costs=self.costs,
                draft_seconds=self.draft_seconds,
            )
            self.results.put(self._key, result)

    def _restore(self, name: str, thread_count: int) -> bool:
        """Use a stored result. Returns False if there is none, or one that does not hold any more."""
        key = self._key_of(name, thread_count)
        stored = self.results.get(key) if self.results is not None and key is not None else None
        if stored is None or stored.kind not in ("plain", self._choose(name)[0]):
            return False
        with threads.restored_on_error():
            torch.set_num_threads(stored.threads)
            if stored.kind != "plain" and not self._install_tested(stored):
                return False
        self._key, self._tested_counts = key, set(stored.tested_counts)
        self.step_seconds, self.costs, self.draft_seconds = (
            stored.step_seconds,
            stored.costs,
            dict(stored.draft_seconds),
        )
        engine = self._layer_engines.get(stored.kind)
        self.state = EngineState(
            kind=stored.kind,
            weights=engine.weights if engine else weight_format(self._target),
            verified=engine is not None and stored.threads in self._tested_counts,
            threads=stored.threads,
            reason=stored.reason,
            tested_on=stored.tested_on if engine else "",
        )
        release_memory()
        return True

    def _install_tested(self, stored: StoredResult) -> bool:
        """Install an engine whose self-test is stored. Returns False, and stays plain, if one width differs now."""
        # Another width on another day.
        width = WIDTHS[date.today().toordinal() % (len(WIDTHS) - 1)]
        try:
            failure = self._layer_engines[stored.kind].install_tested(stored.layouts, width)
        except KeyboardInterrupt:
            self._use_plain("interrupted")
            raise
        if failure and self._formats.as_loaded:
            self._use_plain(self.state.reason)
        return not failure

    def _key_of(self, name: str, thread_count: int) -> str | None:
        """The key under which results are stored. None if they are not stored."""
        if self.results is None or is_tensor_parallel():
            return None
        if self._weights is None:
            self._weights = result_key(self._parts, weights=self._formats.format) or ""
        return f"{self._weights} {name} {thread_count}" if self._weights else None

    def set_threads(self, count: int) -> EngineState:
        """Compute with `count` threads from now on.

        0 means what the environment asks for, otherwise the fastest number.
        """
        with threads.restored_on_error():
            probe = ForwardProbe(self._target)
            if chosen := count or threads.requested_threads():
                torch.set_num_threads(chosen)
            elif self._target.device.type == "cpu":
                self.report("choosing the number of threads")
                threads.fastest_count(lambda: probe.forward(1), threads.candidate_counts())
            self.measure(probe)
            self._record_threads(torch.get_num_threads())
        return self.state

    def measure(self, probe: ForwardProbe | None = None, *, repeats: int = REPEATS) -> None:
        """Measure decode steps and verify passes, with a given probe or a new one.

        Every rank uses the times of rank zero.
        """
        # Adaptive gamma reads these times. Ranks that chose different verify widths would wait for each other forever.
        probe = probe or ForwardProbe(self._target)
        self.step_seconds, self.costs = broadcast(verify_costs(probe, repeats=repeats, report=self.report))
        self.draft_seconds = {}

    def _choose(self, name: str) -> tuple[str, str]:
        """Return the layer engine to install.

        If the name is empty, the models stay plain, and the second value says why.
        """
        reason = "rounding depends on the verify width"
        for candidate, engine in self._layer_engines.items():
            if name in ("auto", candidate):
                reason = engine.unsupported() or (engine.not_faster() if name == "auto" else "")
                if not reason:
                    return candidate, ""
        if name in self._layer_engines:
            raise UserError(f"The {name} engine cannot compute {self._target.name_or_path}: {reason}.")
        return "", reason

    def _use_plain(self, reason: str) -> None:
        for engine in self._layer_engines.values():
            engine.remove()
        self._tested_counts = set()
        self.state = replace(self.state, kind="plain", verified=False, reason=reason, tested_on="")

    def _install(self, name: str, *, requested: str) -> None:
        """Replace plain layers by those of an engine, unless its self-test fails."""
        # The two extremes. A number in between is tested when it is chosen.
        counts, engine = sorted({1, threads.available_threads()}), self._layer_engines[name]
        if self._formats.as_loaded:
            self._use_plain(self.state.reason)  # removes another layer engine
        try:
            failure = engine.install(counts, self.report)
        except KeyboardInterrupt:
            self._use_plain("interrupted")
            raise
        if failure:
            if self._formats.as_loaded:
                # Weights in another format cannot be put back, so their layers stay.
                self._use_plain(f"{requested}: the self-test failed, {failure}")
            if not self._formats.as_loaded or requested == name:
                remedy = "use /engine plain" if self._formats.as_loaded else "start without --engine-weights"
                raise UserError(f"The {name} engine failed its self-test: {failure}. Instead, {remedy}.")
            return
        self._tested_counts = set(counts)
        self.state = replace(self.state, kind=name, weights=engine.weights, verified=True, reason="", tested_on="")

    def _record_threads(self, count: int) -> None:
        """Record the number of threads, after testing a number that has not been tested.

        The guarantee holds only for tested numbers.
        """
        reason = self.state.reason
        if engine := self._layer_engines.get(self.state.kind):
            reason = "" if count in self._tested_counts else engine.self_test(count, self.report)
            if not reason:
                self._tested_counts.add(count)
        self.state = replace(self.state, threads=count, verified=count in self._tested_counts, reason=reason)
