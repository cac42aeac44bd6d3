"""How ambiguous drafters were found to be read, kept in a JSON file from one start to the next.

Whatever is not exactly what `put` writes counts as absent: a damaged or foreign file makes a start slower, never wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from utils.engine.stored_results import entry_digest
from utils.files import replacing
from utils.models.feature_drafter import Conventions
from utils.models.target_identity import fingerprint

FORMAT, VERSION = "readings of drafters", 1
MAX_ENTRIES, MAX_BYTES, MAX_LAYER = 64, 1_000_000, 10_000


@dataclass(frozen=True, slots=True)
class StoredReadings:
    """The file. Its folder need not exist yet."""

    path: Path

    def get(self, key: str) -> Conventions | None:
        """The conventions with this key, if there is an entry that is whole."""
        with suppress(KeyError, TypeError, ValueError):
            entry = self._entries()[key]
            if entry["digest"] == entry_digest(key, entry):
                return _conventions(entry)
        return None

    def put(self, key: str, conventions: Conventions) -> None:
        """Store conventions in place of earlier ones. Does nothing if the file cannot be written."""
        entries = self._entries()
        entries.pop(key, None)  # so that it becomes the newest
        entry: dict[str, Any] = {**asdict(conventions), "feature_layers": list(conventions.feature_layers)}
        entries[key] = entry | {"digest": entry_digest(key, entry)}
        newest = dict([*entries.items()][-MAX_ENTRIES:])
        content = json.dumps({"format": FORMAT, "version": VERSION, "entries": newest}, indent=1)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path, overwrite=True) as file:
                file.write(content.encode() + b"\n")

    def _entries(self) -> dict[str, Any]:
        try:
            # Not a pipe, which would never end.
            if not self.path.is_file() or self.path.stat().st_size > MAX_BYTES:
                return {}
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            return {}
        entries = content.get("entries")
        return entries if isinstance(entries, dict) else {}


def reading_key(files: Sequence[Path], declared: Conventions, target: PreTrainedModel) -> str:
    """What a reading depends on: the drafter's files, the conventions that they declare, and the target.

    Raises OSError for a file that cannot be read.
    """
    digest = hashlib.sha256(repr(declared).encode() + fingerprint(target).numpy().tobytes())
    for path in sorted(files):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _conventions(entry: Mapping[str, Any]) -> Conventions:
    """The conventions that an entry describes. Raises KeyError, TypeError or ValueError if it is damaged."""
    layers = entry["feature_layers"]
    flags = {name: entry[name] for name in Conventions.__dataclass_fields__ if name != "feature_layers"}
    # Not isinstance: True is an int.
    if any(type(layer) is not int or not -1 <= layer <= MAX_LAYER for layer in layers):
        raise ValueError("layers")
    if any(not isinstance(flag, bool) for flag in flags.values()):
        raise ValueError("flags")
    return Conventions(tuple(layers), **flags)
