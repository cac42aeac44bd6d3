"""Engines that compute nothing, for tests of how engines are chosen, installed and given up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from fixed_speeds import FixedSpeeds, fix_speeds, steady
from tiny import tiny_llama

from utils.engine import Engine
from utils.engine.engine import LAYER_ENGINES
from utils.engine.layer_engine import BIT_IDENTICAL, PlainEngine
from utils.engine.stored_results import ResultFile


class FakeEngine(PlainEngine):
    """An engine that replaces nothing.

    trial_fails, fails: what `install` returns or raises for a slice of a model and for whole models. test_fails: what
    the self-test returns or raises. size: of its weights. events: what happened to whole models, shared by all engines
    of a class, because a new one is built for each installation.
    """

    promise = BIT_IDENTICAL
    size = 1000
    trial_fails: Any = ""
    fails: Any = ""
    test_fails: Any = ""
    events: ClassVar[list[str]] = []

    def __init__(self, models: Sequence[Any], *arguments: Any) -> None:
        self.is_whole = vars(models[0]).get("own_id", id(models[0])) == id(models[0])

    def unsupported(self) -> str:
        return ""

    def need(self) -> int:
        return self.size

    def install(self, report: Any = None) -> str:
        self._note("install")
        return _outcome(self.fails if self.is_whole else self.trial_fails)

    def self_test(self, thread_count: int, report: Any = None, extent: Any = "first") -> str:
        self._note(f"test {thread_count}, {extent}")
        return _outcome(self.test_fails)

    def nbytes(self) -> int:
        return self.size

    def remove(self) -> None:
        self._note("remove")

    def _note(self, event: str) -> None:
        if self.is_whole:
            self.events.append(event)


def _outcome(outcome: Any) -> str:
    if isinstance(outcome, BaseException):
        raise outcome
    return str(outcome)


def row(**attributes: Any) -> type[PlainEngine]:
    return type("Fake", (FakeEngine,), {"events": []} | attributes)


def events(name: str) -> list[str]:
    """What happened to whole models with a fake engine."""
    found: list[str] = LAYER_ENGINES[name].events  # type: ignore[attr-defined]
    return found


def whole_llama() -> Any:
    """A model that a fake engine can tell from slices of it."""
    model = tiny_llama(vocab_size=96)
    vars(model)["own_id"] = id(model)
    return model


def started(times: dict[str, float], file: Path | None = None) -> tuple[Engine, FixedSpeeds]:
    engine = Engine([whole_llama()], identity="the files")
    engine.results = None if file is None else ResultFile(file)
    return engine, fix_speeds(engine, steady(times))
