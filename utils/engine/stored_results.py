"""Results of the self-test and measured costs, kept in a JSON file from one start to the next.

Whatever is not exactly what `put` writes counts as absent: a damaged or foreign file makes a start slower, never wrong.
Which results belong to which models and machine is decided by the caller's key (`utils.engine.fingerprint`).
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from utils.bounds import THREADS, WholeRange
from utils.engine.engine_figures import EngineFigures
from utils.engine.entry_file import EntryFile

FORMAT, VERSION = "results of the engine's self-test", 2
MAX_ENTRIES = 32
LAYOUTS, WIDTHS = WholeRange(0, 1024), WholeRange(1, 1024)
MAX_RATE = 1e9  # tokens per second
MAX_SECONDS, MAX_STEPS, MAX_TEXT = 10_000.0, 1_000.0, 1_000


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What the preparation of an engine found out.

    kind, reason: as in EngineState. tested_on: the day of the self-test. tested_counts: the numbers of threads with
    which it passed. threads: the chosen number. layouts: see LayerEngine. step_seconds, costs, draft_seconds, table:
    see Engine.
    """

    kind: str
    reason: str
    tested_on: str
    tested_counts: tuple[int, ...]
    threads: int
    layouts: Mapping[str, int]
    step_seconds: float
    costs: tuple[float, ...]
    draft_seconds: Mapping[str, float]
    table: Mapping[str, EngineFigures]

    def has_expired(self, today: date) -> bool:
        """Whether an engine failed on an earlier day. The reason may have passed since, such as a lack of memory."""
        return any(row.failed for row in self.table.values()) and self.tested_on != today.isoformat()


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The file. Its folder need not exist yet."""

    path: Path

    def get(self, key: str) -> StoredResult | None:
        """The result with this key, if there is one that is whole."""
        with suppress(KeyError, TypeError, ValueError):
            if (entry := self._file.get(key)) is not None:
                return _result(entry)
        return None

    def put(self, key: str, result: StoredResult) -> bool:
        """Store a result in place of an earlier one. Returns False if the file cannot be written."""
        return self._file.put(key, asdict(result))

    def drop(self, key: str) -> None:
        """Forget a result."""
        self._file.drop(key)

    @property
    def _file(self) -> EntryFile:
        return EntryFile(self.path, FORMAT, VERSION, MAX_ENTRIES)


def _result(entry: Any) -> StoredResult:
    """The result that an entry of the file describes. Raises KeyError, TypeError or ValueError if it is damaged."""
    result = StoredResult(
        kind=_text(entry["kind"]),
        reason=_text(entry["reason"]),
        tested_on=date.fromisoformat(_text(entry["tested_on"])).isoformat(),
        tested_counts=tuple(_count(count) for count in _list(entry["tested_counts"])),
        threads=_count(entry["threads"]),
        layouts={name: _count(parts, LAYOUTS) for name, parts in _table(entry["layouts"]).items()},
        step_seconds=_number(entry["step_seconds"], MAX_SECONDS),
        costs=tuple(_number(cost, MAX_STEPS) for cost in _list(entry["costs"])),
        draft_seconds={name: _number(cost, MAX_SECONDS) for name, cost in _table(entry["draft_seconds"]).items()},
        table={name: _figures(row) for name, row in _table(entry["table"]).items()},
    )
    # A decode step of no time would make every draft cost nothing.
    if not result.step_seconds:
        raise ValueError("no step was measured")
    return result


def _figures(row: object) -> EngineFigures:
    """The figures of one engine."""
    known = _table(row)
    measured_on = _text(known["measured_on"])
    return EngineFigures(
        problem=_text(known["problem"]),
        failed=_flag(known["failed"]),
        promise=_text(known["promise"]),
        verified=_flag(known["verified"]),
        threads=_count(known["threads"], WholeRange(0, THREADS.high)),
        steps=tuple((_count(count), _number(seconds, MAX_SECONDS)) for count, seconds in _pairs(known["steps"])),
        step_seconds=_number(known["step_seconds"], MAX_SECONDS),
        costs=tuple((_count(width, WIDTHS), _number(cost, MAX_STEPS)) for width, cost in _pairs(known["costs"])),
        prefill=_number(known["prefill"], MAX_RATE),
        nbytes=_count(known["nbytes"], WholeRange(0)),
        measured_on=date.fromisoformat(measured_on).isoformat() if measured_on else "",
    )


def _pairs(value: object) -> list[list[object]]:
    pairs = [_list(pair) for pair in _list(value)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(value)
    return pairs


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(value)
    return value


def _count(value: object, allowed: WholeRange = THREADS) -> int:
    if type(value) is not int:  # bool is a subclass of int
        raise ValueError(value)
    return allowed.check(value)  # its UserError is a ValueError


def _number(value: object, high: float) -> float:
    # Not bool, which is a subclass of int. NaN is not below any bound.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
        raise ValueError(value)
    return float(value)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(value)
    return value


def _table(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(value)
    return value
