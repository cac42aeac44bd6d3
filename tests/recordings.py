"""Records files of tiny sessions, and hooks into the runs of the commands that repeat prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of

from utils.comparison.arms import LocalArm, Run
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.prompts.conversation import Turns

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


def before_each_run(monkeypatch: pytest.MonkeyPatch, hook: Callable[[Strategy, Settings], None]) -> None:
    """Call `hook` before each run that a command starts on its own storage, warm-up runs included."""
    run = LocalArm.run

    def hooked(arm: LocalArm, text: str, settings: Settings, history: Turns = (), watch: Any = None) -> Run:
        if arm.job is None:
            hook(arm.strategy, settings)
        return run(arm, text, settings, history, watch)

    monkeypatch.setattr(LocalArm, "run", hooked)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    """Press Ctrl-C after this many runs of a command, warm-up runs included."""
    started = count()

    def hook(strategy: Strategy, settings: Settings) -> None:
        if next(started) >= runs:
            raise KeyboardInterrupt

    before_each_run(monkeypatch, hook)
