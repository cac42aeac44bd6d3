"""The progress of a distillation: the record that is saved with the work, and lines that report speed and time left."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from utils.files import replacing

REPORT_SECONDS = 15.0
LOW_ACCEPTANCE = 0.2  # of the first draft of a round; below, drafting costs more than it saves
PROGRESS_FILE = "progress.json"

Report = Callable[[str], None]
# Acceptance rates by text ("greedy", "drawn") and position, None if nothing was counted.
Rates = dict[str, list[float | None]]


@dataclass(slots=True)
class TrainingProgress:
    """Seconds of generation (`writing`) and training so far."""

    writing: float = 0.0
    training: float = 0.0

    def save(self, folder: Path) -> None:
        write_json(folder / PROGRESS_FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> TrainingProgress:
        """The stored progress, or an empty one."""
        file = folder / PROGRESS_FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else cls()


class ProgressReporter:
    """Reports the progress of one task from time to time. done, total: tokens finished at the start and at the end."""

    def __init__(self, report: Report, task: str, done: int, total: int) -> None:
        self._report, self._task, self._done, self.total = report, task, done, total
        # After a resume the speed counts only what this process has done.
        self._initial, self._started = done, time.monotonic()
        self._last_report = self._started

    def advance(self, tokens: int, remark: str = "") -> None:
        """Count `tokens` more, and report if the last report is long enough ago."""
        self._done += tokens
        now = time.monotonic()
        if now - self._last_report > REPORT_SECONDS:
            self._last_report, speed = now, (self._done - self._initial) / (now - self._started)
            left = duration_text((self.total - self._done) / speed)
            self._report(
                f"{self._task}: {self._done:,} of {self.total:,} tokens, {speed:,.0f} tokens/s{remark}, {left} left"
            )


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; an interruption leaves the old file in place."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode())


def duration_text(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def rate_text(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def rates_text(rates: Rates) -> str:
    """Acceptance rates by position, in one line."""
    greedy, sampled = (" ".join(map(rate_text, rates[name])) for name in ("greedy", "drawn"))
    return f"greedy acceptance {greedy}, at T = 1 {sampled}"


def advice(rates: Rates, out: Path, target: str) -> list[str]:
    """What to do with a finished drafter: how to load it, and whether it is worth that."""
    lines = [f"load it with: infer.py --target {shlex.quote(target)} --drafter {shlex.quote(str(out))}"]
    first = [values[0] for values in rates.values() if values[0] is not None]
    if first and max(first) < LOW_ACCEPTANCE:
        lines.append(
            f"fewer than {LOW_ACCEPTANCE:.0%} of first drafts are accepted, so this drafter is unlikely to save time: "
            f"generate more text (--tokens), train longer (--passes), or go on with --start {shlex.quote(str(out))}"
        )
    return lines
