"""A clock and forward passes that take given times, for tests of the choice among engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from utils.engine import Engine
from utils.engine.engine import LAYER_ENGINES
from utils.engine.trials import Meter, Trials

RUN = Trials.run
Speed = Callable[[str, int, int], float]  # (engine, threads, width) -> seconds of a forward pass


@dataclass
class FixedSpeeds:
    """Times by engine, number of threads and width, on a clock that only forward passes advance.

    A pass takes the same time whatever number of layers is measured. prefill: tokens per second by engine.
    """

    speed: Speed
    prefill: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    calls: list[tuple[str, int, int]] = field(default_factory=list)  # what was measured

    def meter(self) -> Meter:
        return Meter(lambda: self.now, lambda model, name: self.probe(name))

    def probe(self, name: str) -> Any:
        return FixedProbe(self, name)


@dataclass
class FixedProbe:
    """Stands in for a ForwardProbe."""

    speeds: FixedSpeeds
    name: str
    max_width: int = 17

    def make_room(self, width: int) -> None:
        """Nothing is full."""

    def forward(self, width: int) -> None:
        call = (self.name, torch.get_num_threads(), width)
        self.speeds.calls.append(call)
        self.speeds.now += self.speeds.speed(*call)

    def prefill(self, count: int) -> int:
        self.speeds.now += count / self.speeds.prefill.get(self.name, 1e6)
        return count


def steady(times: dict[str, float]) -> Speed:
    """Seconds of a decode step by engine. A verify pass takes a tenth more for each draft."""
    return lambda name, threads, width: times[name] * (1 + 0.1 * (width - 1))


def fix_speeds(engine: Engine, speed: Speed, **options: Any) -> FixedSpeeds:
    """Replace the clock and the forward passes of an engine's trials."""
    speeds = FixedSpeeds(speed, **options)
    engine.meter = speeds.meter()
    return speeds


def only_engines(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave only these rows in the table of engines."""
    for name in {*LAYER_ENGINES} - {*names}:
        monkeypatch.delitem(LAYER_ENGINES, name)


def prefer(name: str) -> None:
    """Let every engine's trials find this engine twice as fast as any other, until the end of the test."""

    def run(self: Any) -> Any:
        self.meter = FixedSpeeds(lambda kind, threads, width: (1 if kind == name else 2) / 1024).meter()  # exact sums
        return RUN(self)

    mock.patch.object(Trials, "run", run).start()
