"""Sessions for tests of /verdict.

Runs are those of tiny models; only their seconds are replaced. A fake clock adds them up, so no test waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Screen, open_session, records_of, table_pair
from simulations import FEWER

from utils.commands.verdicts import measurement
from utils.comparison import arms
from utils.comparison.arms import LocalArm, Run
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.decode.steps import Step
from utils.metrics import intervals
from utils.metrics.results import RoundTiming
from utils.prompts.conversation import Turns
from utils.prompts.prompt_files import Prompt
from utils.repl.repl_session import ReplSession, Verdict

STEP = 0.1  # seconds of a decode step
Cost = Callable[[Strategy, Step], float]
# One chooses the candidate, with every drafter and gamma, and six are measured.
TEXTS = [f"{word} and more {word}" for word in ("one", "two", "three", "four", "five", "six", "seven")]


def similar_pair() -> Any:
    """A pair whose drafter is the target with some noise, so that many drafts are accepted."""
    pair = table_pair()
    drafter = deepcopy(pair.target)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            weight.add_(0.15 * weight.std(correction=0) * noise)
    pair.drafter = drafter
    return pair


def helpful(strategy: Strategy, step: Step) -> float:
    """Seconds of a round in which drafts cost nothing."""
    return STEP


def useless(strategy: Strategy, step: Step) -> float:
    """Verifying a draft takes as long as decoding it, and so does drafting it."""
    return STEP * (1 + 2 * len(step.drafted)) if step.drafted else STEP


class Runs:
    """Replaces the seconds of every run, and notes what was run. `passes` is the maximum, which costs most time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Cost, noise: float = 0.0, passes: int = 2) -> None:
        self.made: list[tuple[str, int, tuple[int, ...]]] = []  # strategy, length, prompt
        self.now, self._cost, self._noise = 0.0, cost, noise
        self._random = np.random.default_rng(3)
        self._run_arm = LocalArm.run
        self.seeds: set[int] = set()
        self._known: dict[Any, Run] = {}
        self.stop_after: Callable[[], bool] = lambda: False
        monkeypatch.setattr(intervals, "RESAMPLES", FEWER)
        monkeypatch.setattr(measurement, "MOST_PASSES", passes)
        monkeypatch.setattr(measurement, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(LocalArm, "run", lambda *arguments, **options: self._run(*arguments, **options))

    def _decoded(self, arm: LocalArm, text: str, settings: Settings, history: Turns) -> Run:
        """The same runs give the same tokens, so they are decoded once."""
        greedy = settings.processor.is_greedy
        key = (id(arm.pair), text, history, arm.name, repr(replace(settings, seed=0) if greedy else settings))
        if key not in self._known:
            self._known[key] = self._run_arm(arm, text, settings, history)
        return self._known[key]

    def _run(self, arm: LocalArm, text: str, settings: Settings, history: Turns = (), watch: Any = None) -> Run:
        if arm.job is not None:
            return self._run_arm(arm, text, settings, history, watch)
        if self.stop_after():
            raise KeyboardInterrupt
        run = self._decoded(arm, text, settings, history)
        assert run.generation is not None
        steps = run.generation.steps
        self.seeds.add(settings.seed)
        self.made.append((arm.name, settings.length, tuple(arms.ids_of(arm.pair, text, settings, history))))
        factor = exp(self._noise * self._random.standard_normal())
        each = [factor * self._cost(arm.strategy, step) for step in steps]
        self.now += sum(each)
        timings = tuple(
            RoundTiming(drafting := 0.2 * STEP * len(step.drafted), spent - drafting, spent, len(step.drafted))
            for step, spent in zip(steps, each, strict=True)
        )
        generation = replace(run.generation, seconds=sum(each), first_seconds=each[0], timings=timings)
        changed = {"generation": generation, "seconds": sum(each), "first_seconds": each[0]}
        return replace(run, **changed, decode_tokens_per_second=generation.decode_tokens_per_second)


def prompts_file(folder: Path, prompts: list[Any]) -> Path:
    path = folder / "prompts.jsonl"
    rows = (row if isinstance(row, dict) else {"prompt": row} for row in prompts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def session_of(view: Screen, folder: Path, pair: Any = None) -> ReplSession:
    session = open_session(view, pair or similar_pair(), records=folder / "records.jsonl")
    for line in ("/length 12", "/chat off"):
        assert session.handle(line) is Verdict.DONE
    view.take()
    return session


def ids_of(session: ReplSession, prompts: Iterable[Prompt]) -> set[tuple[int, ...]]:
    return {tuple(session.harness.prompt_ids(prompt.text, session.settings)) for prompt in prompts}


def verdict_of(session: ReplSession, view: Screen, folder: Path, line: str) -> tuple[dict[str, Any], str]:
    """The figures of the candidate, and all that is shown."""
    assert session.handle(line) is Verdict.DONE, view.take()
    return records_of(folder / "records.jsonl")[-1]["findings"][-1], view.take()[0]
