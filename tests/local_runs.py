"""Runs of local strategies from rounds that a test has made, without models."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from tiny import tiny_tokenizer

from utils.comparison.arms import ComparedRun, LocalArm
from utils.comparison.runs import Run
from utils.comparison.strategies import Strategy
from utils.metrics.results import Comparison, Generation


@cache
def _tokenizer() -> Any:
    return tiny_tokenizer()


def arm_of(strategy: Strategy) -> LocalArm:
    nothing: Any = None
    return LocalArm(strategy, nothing)


def local_run(strategy: Strategy, generation: Generation) -> Run:
    job: Any = SimpleNamespace(pair=SimpleNamespace(tokenizer=_tokenizer()), prompt=[])
    return Run.of_strategy(strategy, job, generation)


def compared_run(strategy: Strategy, generation: Generation, comparison: Comparison) -> ComparedRun:
    return ComparedRun(arm_of(strategy), local_run(strategy, generation), comparison)
