"""Runs of local strategies from rounds that a test has made, without models."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from tiny import tiny_tokenizer

from utils.comparison.arms import ComparedRun, LocalArm, Run, compare_run
from utils.comparison.strategies import STRATEGIES, Strategy
from utils.config.settings import Settings
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


def compared_with(run: Run, target: Run | None, *, same_request: bool = True) -> ComparedRun:
    """The run and its comparison with the target's run."""
    runs = [] if target is None else [target]
    arm = arm_of(next(row for row in STRATEGIES if run.name.startswith(row.name)))
    return ComparedRun(arm, run, compare_run(run, runs, Settings(), same_request=same_request))
