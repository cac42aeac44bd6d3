"""Records files of tiny sessions, and hooks into the runs of the commands that repeat prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes import Screen, open_session, records_of

from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.metrics.results import Generation

Row = dict[str, Any]


def recorded(view: Screen, folder: Path, *lines: str, **options: Any) -> Path:
    """A file with the records of a session that processed these lines."""
    file = folder / "runs.jsonl"
    session = open_session(view, records=file, **options)
    for line in lines:
        session.handle(line)
    view.take()
    return file


def edited(file: Path, change: Callable[[Row], None]) -> Path:
    """The same file, after a change to each of its records."""
    rows = records_of(file)
    for row in rows:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def before_each_run(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, hook: Callable[[Strategy, Settings], None]
) -> None:
    """Call `hook` before each run that `module` starts, warm-up runs included."""
    run_alone = module.run_alone

    def hooked(bench: Any, prompt: list[int], strategy: Strategy, settings: Settings, **options: Any) -> Generation:
        hook(strategy, settings)
        run: Generation = run_alone(bench, prompt, strategy, settings, **options)
        return run

    monkeypatch.setattr(module, "run_alone", hooked)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, module: ModuleType, runs: int) -> None:
    """Press Ctrl-C after this many runs of `module`, warm-up runs included."""
    started = count()

    def hook(strategy: Strategy, settings: Settings) -> None:
        if next(started) >= runs:
            raise KeyboardInterrupt

    before_each_run(monkeypatch, module, hook)
