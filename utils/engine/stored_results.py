"""Results of the self-test and measured costs, kept in a JSON file from one start to the next.

Which results belong to which models and machine is decided by the caller's key (`utils.engine.fingerprint`). An entry
that cannot be read makes a start slower, never wrong: it is dropped, and everything is measured again.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from utils.engine.engine_choice import EngineFigures
from utils.engine.forward_timing import LongerContext
from utils.files import replacing

MAX_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class EntryFile:
    """The file. Its folder need not exist yet. format, version: what the entries are. most: how many are kept."""

    path: Path
    format: str
    version: int
    most: int

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry with this key, if there is one that is whole."""
        with suppress(KeyError, TypeError, ValueError):
            entry: dict[str, Any] = self._entries()[key]
            if entry["digest"] == entry_digest(key, entry):
                return entry
        return None

    def put(self, key: str, entry: Mapping[str, Any]) -> bool:
        """Store an entry in place of an earlier one. Returns False if the file cannot be written."""
        entries = self._entries()
        entries.pop(key, None)  # so that it becomes the newest
        entries[key] = {**entry, "digest": entry_digest(key, entry)}
        return self._write(entries)

    def drop(self, key: str) -> None:
        """Forget an entry."""
        entries = self._entries()
        if entries.pop(key, None) is not None:
            self._write(entries)

    def _entries(self) -> dict[str, Any]:
        try:
            # Not a pipe, which would never end.
            if not self.path.is_file() or self.path.stat().st_size > MAX_BYTES:
                return {}
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        written = isinstance(content, dict) and (content.get("format"), content.get("version"))
        if written != (self.format, self.version):
            return {}
        entries = content.get("entries")
        return entries if isinstance(entries, dict) else {}

    def _write(self, entries: Mapping[str, Any]) -> bool:
        newest = dict([*entries.items()][-self.most :])
        content = json.dumps({"format": self.format, "version": self.version, "entries": newest}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path, overwrite=True) as file:
                file.write(content.encode() + b"\n")
        except OSError:
            return False
        return True


def entry_digest(key: str, entry: Mapping[str, Any]) -> str:
    """A digest of an entry without its own digest, because a damaged number can look like a valid one."""
    content = json.dumps([key, {name: value for name, value in entry.items() if name != "digest"}], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


FORMAT, VERSION = "results of the engine's self-test", 4
MAX_ENTRIES = 32


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What the preparation of an engine found out.

    kind, reason: as in EngineState. tested_on: the day of the self-test. tested_counts: the numbers of threads with
    which it passed. threads: the chosen number. step_seconds, costs,
    draft_seconds, table, longer: see Engine.
    """

    kind: str
    reason: str
    tested_on: str
    tested_counts: tuple[int, ...]
    threads: int
    step_seconds: float
    costs: tuple[float, ...]
    draft_seconds: Mapping[str, list[float]]
    table: Mapping[str, EngineFigures]
    longer: LongerContext | None = None

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
                if (longer := entry.pop("longer", None)) is not None:
                    longer = LongerContext(**{**longer, "costs": tuple(longer["costs"])})
                return StoredResult(**entry, table=table, longer=longer)
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
