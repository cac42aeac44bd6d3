"""Engine: choose how the loaded models are computed, with how many threads, and report what is guaranteed.

`plain` is PyTorch as it is. The other engines are the rows of LAYER_ENGINES. `auto` tries the first of them that
supports the models and is likely to be faster. If there is none, or its self-test fails, the models stay plain.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from utils.distributed import broadcast
from utils.engine import threads
from utils.engine.forward_timing import REPEATS, ForwardProbe, verify_costs
from utils.engine.invariant import InvariantEngine, weight_format
from utils.engine.layer_engine import LayerEngine
from utils.errors import UserError
from utils.freed_memory import release_memory

LAYER_ENGINES = {"invariant": InvariantEngine}


@dataclass(frozen=True, slots=True)
class EngineState:
    """How the models are computed at the moment.

    kind: "plain" or a name in LAYER_ENGINES. weights: the number format of the linear weights. verified: whether the
    self-test passed with this number of threads. reason: why it did not, or why the engine is plain.
    """

    kind: str
    weights: str
    verified: bool
    threads: int
    reason: str = ""

    def sentence(self) -> str:
        """Return one line for the screen."""
        plural = "s" if self.threads > 1 else ""
        guarantee = "verified" if self.verified else f"not guaranteed ({self.reason})"
        return f"{self.kind}, {self.weights} weights, {self.threads} thread{plural}; bit-identical: {guarantee}"

    def figures(self) -> dict[str, Any]:
        """Return the fields for a record."""
        return asdict(self)


class Engine:
    """The models of a pair and the engine that computes them.

    models: the target, then the drafter if there is one. helpers: modules that are computed the same way but not
    tested, such as a draft head. int8_weights: round the linear weights to int8, which cannot be undone. Raises
    UserError if that is not possible.
    """

    def __init__(
        self, models: Sequence[PreTrainedModel], *, helpers: Sequence[nn.Module] = (), int8_weights: bool = False
    ) -> None:
        self._target = models[0]
        self._int8_weights = int8_weights
        self._layer_engines: dict[str, LayerEngine] = {
            name: build(models, helpers, int8_weights=int8_weights) for name, build in LAYER_ENGINES.items()
        }
        self._tested_counts: set[int] = set()  # numbers of threads with which the self-test passed
        self.step_seconds = 0.0  # of a decode step
        self.costs: tuple[float, ...] = ()  # extra time of verify passes with 1, 2, ... drafts, in decode steps
        self.state = EngineState("plain", weight_format(self._target), False, torch.get_num_threads(), "not tested")
        # Reported now, because a request for int8 weights has no plain engine to fall back to.
        if int8_weights:
            name, reason = self._choose("auto")
            if not name:
                raise UserError(f"int8 engine weights are not possible: {reason}. Omit --engine-weights.")

    def use(self, name: str, thread_count: int) -> EngineState:
        """Compute with an engine ("plain", "auto" or a name in LAYER_ENGINES) and a number of threads.

        0 threads: see set_threads.

        Raises UserError if the engine cannot compute these models, or if `plain` is requested after weights were
        rounded to int8. The models are then computed as before.
        """
        if name == "plain" and self._int8_weights:
            raise UserError("The plain engine has no int8 weights: start the program without --engine-weights.")
        chosen, reason = self._choose(name)
        if not chosen:
            self._use_plain(reason if name == "plain" else f"{name}: {reason}")
        # An engine that is installed already has passed its self-test; only the number of threads may change.
        elif self.state.kind != chosen:
            self._install(chosen, requested=name)
        # After the engine is installed, because the fastest number of threads depends on its kernels.
        self.set_threads(thread_count)
        release_memory()  # the original weights, which kernels have replaced
        return self.state

    def set_threads(self, count: int) -> EngineState:
        """Compute with `count` threads from now on.

        0 means what the environment asks for, otherwise the fastest number.
        """
        with threads.restored_on_error():
            probe = ForwardProbe(self._target)
            if chosen := count or threads.requested_threads():
                torch.set_num_threads(chosen)
            elif self._target.device.type == "cpu":
                threads.fastest_count(lambda: probe.forward(1), threads.candidate_counts())
            self.measure(probe)
            self._record_threads(torch.get_num_threads())
        return self.state

    def measure(self, probe: ForwardProbe | None = None, *, repeats: int = REPEATS) -> None:
        """Measure decode steps and verify passes, with a given probe or a new one.

        Every rank uses the times of rank zero.
        """
        # Adaptive gamma reads these times. Ranks that chose different verify widths would wait for each other forever.
        self.step_seconds, self.costs = broadcast(verify_costs(probe or ForwardProbe(self._target), repeats=repeats))

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
        self.state = replace(self.state, kind="plain", verified=False, reason=reason)

    def _install(self, name: str, *, requested: str) -> None:
        """Replace plain layers by those of an engine, unless its self-test fails."""
        # The two extremes. A number in between is tested when it is chosen.
        counts, engine = sorted({1, threads.available_threads()}), self._layer_engines[name]
        if not self._int8_weights:
            self._use_plain(self.state.reason)  # removes another layer engine
        try:
            failure = engine.install(counts)
        except KeyboardInterrupt:
            self._use_plain("interrupted")
            raise
        if failure:
            if not self._int8_weights:
                # Weights that were rounded to int8 cannot be put back, so their layers stay.
                self._use_plain(f"{requested}: the self-test failed, {failure}")
            if self._int8_weights or requested == name:
                remedy = "start without --engine-weights" if self._int8_weights else "use /engine plain"
                raise UserError(f"The {name} engine failed its self-test: {failure}. Instead, {remedy}.")
            return
        self._tested_counts = set(counts)
        self.state = replace(self.state, kind=name, weights=engine.weights, verified=True, reason="")

    def _record_threads(self, count: int) -> None:
        """Record the number of threads, after testing a number that has not been tested.

        The guarantee holds only for tested numbers.
        """
        reason = self.state.reason
        if engine := self._layer_engines.get(self.state.kind):
            reason = "" if count in self._tested_counts else engine.self_test(count)
            if not reason:
                self._tested_counts.add(count)
        self.state = replace(self.state, threads=count, verified=count in self._tested_counts, reason=reason)
