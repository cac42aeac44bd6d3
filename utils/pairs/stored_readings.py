"""How ambiguous drafters were found to be read, kept in a JSON file from one start to the next.

Whatever is not exactly what `put` writes counts as absent: a damaged or foreign file makes a start slower, never wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from utils.engine.stored_results import EntryFile
from utils.models.feature_drafter import Conventions
from utils.models.target_identity import fingerprint

FORMAT, VERSION = "readings of drafters", 1
MAX_ENTRIES, MAX_LAYER = 64, 10_000


@dataclass(frozen=True, slots=True)
class StoredReadings:
    """The file. Its folder need not exist yet."""

    path: Path

    def get(self, key: str) -> Conventions | None:
        """The conventions with this key, if there is an entry that is whole."""
        with suppress(KeyError, TypeError, ValueError):
            if (entry := self._file.get(key)) is not None:
                return _conventions(entry)
        return None

    def put(self, key: str, conventions: Conventions) -> None:
        """Store conventions in place of earlier ones. Does nothing if the file cannot be written."""
        self._file.put(key, {**asdict(conventions), "feature_layers": list(conventions.feature_layers)})

    @property
    def _file(self) -> EntryFile:
        return EntryFile(self.path, FORMAT, VERSION, MAX_ENTRIES)


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
