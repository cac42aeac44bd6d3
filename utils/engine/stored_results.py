"""Results of the self-test and measured costs, kept in a JSON file from one start to the next.

Which results belong to which models and machine is decided by the caller's key (`utils.engine.fingerprint`). An entry
that cannot be read makes a start slower, never wrong: it is dropped, and everything is measured again.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from utils.engine.engine_choice import EngineFigures
from utils.engine.entry_file import EntryFile

FORMAT, VERSION = "results of the engine's self-test", 3
MAX_ENTRIES = 32


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What the preparation of an engine found out.

    kind, reason: as in EngineState. tested_on: the day of the self-test. tested_counts: the numbers of threads with
    which it passed. threads: the chosen number. layouts: of all engines, see LayerEngine. step_seconds, costs,
    draft_seconds, table: see Engine.
    """

    kind: str
    reason: str
    tested_on: str
    tested_counts: tuple[int, ...]
    threads: int
    layouts: Mapping[str, Mapping[str, int]]
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
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            if (entry := self._file.get(key)) is not None:
                entry.pop("digest")
                table = {name: _figures(row) for name, row in entry.pop("table").items()}
                entry |= {name: tuple(entry[name]) for name in ("tested_counts", "costs")}
                return StoredResult(**entry, table=table)
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


def _figures(row: Mapping[str, Any]) -> EngineFigures:
    pairs = {name: tuple((int(count), float(value)) for count, value in row[name]) for name in ("steps", "costs")}
    return EngineFigures(**{**row, **pairs})
