"""Engines that compute nothing, for tests of how engines are chosen, installed and given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fixed_speeds import FixedSpeeds, fix_speeds, steady
from tiny import tiny_llama

from utils.engine import Engine
from utils.engine.engine_table import EngineRow
from utils.engine.layer_engine import BIT_IDENTICAL
from utils.engine.stored_results import ResultFile


class FakeEngine:
    """An engine that replaces nothing. fails: what `install` returns or raises, one for each installation.
    test_fails: what the self-test returns or raises."""

    promise = BIT_IDENTICAL
    fails: tuple[Any, ...] = ()
    weights = "float32"
    test_fails: Any = ""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.layouts: dict[str, int] = {}
        self.events: list[str] = []

    def unsupported(self) -> str:
        return ""

    def install(self, thread_counts: Sequence[int], report: Any) -> str:
        self.events.append("install")
        return self._outcome()

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        self.events.append("install tested")
        return self._outcome()

    def _outcome(self) -> str:
        done = self.events.count("install") + self.events.count("install tested")
        outcome = self.fails[done - 1] if done <= len(self.fails) else ""
        if isinstance(outcome, BaseException):
            raise outcome
        return str(outcome)

    def self_test(self, thread_count: int, report: Any) -> str:
        self.events.append(f"test {thread_count}")
        if isinstance(self.test_fails, BaseException):
            raise self.test_fails
        return str(self.test_fails)

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def nbytes(self) -> int:
        return 1000

    def remove(self) -> None:
        self.events.append("remove")


class FakeParkingEngine(FakeEngine):
    """It can be parked. computes: whether it is in use."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.in_trials = self.computes = self.parked = False

    def install(self, thread_counts: Sequence[int], report: Any) -> str:
        self.computes = True
        return super().install(thread_counts, report)

    def install_tested(self, layouts: Mapping[str, int], width: int) -> str:
        self.computes = True
        return super().install_tested(layouts, width)

    def remove(self) -> None:
        super().remove()
        self.parked = self.in_trials and (self.computes or self.parked)
        self.computes = False

    def begin_trials(self, memory: Any) -> None:
        self.in_trials = True

    def end_trials(self) -> None:
        self.events.append("end trials")
        self.in_trials = self.parked = False

    def is_parked(self) -> bool:
        return self.parked

    def resume(self) -> None:
        assert self.parked
        self.events.append("resume")
        self.computes, self.parked = True, False


def row(**attributes: Any) -> EngineRow:
    return EngineRow(type("Fake", (FakeEngine,), attributes), "", "")


def parking_row(**attributes: Any) -> EngineRow:
    return EngineRow(type("Fake", (FakeParkingEngine,), attributes), "", "")


def started(times: dict[str, float], file: Path | None = None) -> tuple[Engine, FixedSpeeds]:
    engine = Engine([tiny_llama(vocab_size=96)])
    engine.results = None if file is None else ResultFile(file)
    return engine, fix_speeds(engine, steady(times))
