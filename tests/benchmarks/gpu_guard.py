"""Sections of `make gpu-check` that cannot end the check: what is missing, fails or takes too long becomes a row.

Only the standard library is imported, so that even a machine without torch gets a report.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

Row = dict[str, Any]


class NotRun(Exception):
    """A reason why something cannot be measured here. It is not a failure."""


class OutOfTime(BaseException):
    """The time of a section is over. Not an Exception, so that no handler inside the section takes it."""


@dataclass
class Result:
    """What a section found. status: "ran", "not run", "failed" or "out of time"; rows up to then are kept."""

    name: str
    status: str = "ran"
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def record(self) -> Row:
        """Return the fields for the JSON file."""
        return asdict(self)

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong that is not the machine's fault."""
        return self.status == "failed" or any("failed" in row for row in self.rows)


def run_section(name: str, section: Callable[[], Iterator[Row]], seconds: float) -> Result:
    """Collect the rows of a section for at most `seconds`."""
    result, started = Result(name), time.monotonic()
    try:
        with _time_limit(seconds):
            for row in section():
                result.rows.append(row)
    except (NotRun, ImportError, SyntaxError) as error:
        result.status, result.reason = "not run", reason_of(error)
    except OutOfTime:
        result.status, result.reason = "out of time", f"stopped after {seconds:.0f} s"
    except Exception as error:
        result.status, result.reason = "failed", reason_of(error)
    result.seconds = time.monotonic() - started
    return result


def attempted(row: Row, function: Callable[..., Row], *args: Any) -> Row:
    """Return the row with what a function adds, or with the reason under "not run" or "failed"."""
    try:
        return row | function(*args)
    except (NotRun, ImportError) as error:
        return row | {"not run": reason_of(error)}
    except Exception as error:
        return row | {"failed": reason_of(error)}


def reason_of(error: BaseException) -> str:
    """Return one line about an error, and where it was raised unless it says that something is missing."""
    line = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    if isinstance(error, (NotRun, ImportError)):
        return line
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {line} ({where.filename.rpartition('/')[2]}:{where.lineno})"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
