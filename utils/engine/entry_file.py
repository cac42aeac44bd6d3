"""A JSON file of entries by key, kept from one start to the next. The newest stay.

Whatever is not exactly what `put` writes counts as absent: a damaged or foreign file makes a start slower, never wrong.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
