"""StoredEngine: the stored results of one set of models, found by what they depend on and by what was asked for."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date

from torch import nn

from utils.distributed import is_tensor_parallel
from utils.engine.fingerprint import result_key
from utils.engine.stored_results import ResultFile, StoredResult


class StoredEngine:
    """file: None to store nothing. tested_on: the day on which the present result was obtained."""

    def __init__(self, parts: Sequence[nn.Module], weights: str) -> None:
        self.file: ResultFile | None = None
        self.tested_on = ""
        self._parts, self._format = parts, weights
        self._weights: str | None = None  # their fingerprint, computed before they are packed
        self._key: str | None = None  # of the present result

    def get(self, name: str, thread_count: int) -> StoredResult | None:
        """The result for an engine or "auto", which is the present one from now on. None if there is none.

        The table of engines is the one that "auto" has measured.
        """
        key = self._key_of(name, thread_count)
        stored = self._read(key)
        if stored is None or stored.has_expired(date.today()):
            return None
        self._key, self.tested_on = key, stored.tested_on
        automatic = self._read(self._key_of("auto", thread_count))
        return stored if stored.table or automatic is None else replace(stored, table=automatic.table)

    def begin(self, name: str, thread_count: int) -> None:
        """A new result is being obtained today."""
        self._key, self.tested_on = self._key_of(name, thread_count), date.today().isoformat()

    def put(self, result: StoredResult) -> None:
        """Store the present result."""
        if self.file is not None and self._key is not None:
            self.file.put(self._key, result)

    def drop(self, name: str, thread_count: int) -> None:
        """Forget a stored result."""
        if self.file is not None and (key := self._key_of(name, thread_count)):
            self.file.drop(key)

    def _read(self, key: str | None) -> StoredResult | None:
        return None if self.file is None or key is None else self.file.get(key)

    def _key_of(self, name: str, thread_count: int) -> str | None:
        """The key under which results are stored. None if they are not stored."""
        if self.file is None or is_tensor_parallel():
            return None
        if self._weights is None:
            self._weights = result_key(self._parts, weights=self._format) or ""
        return f"{self._weights} {name} {thread_count}" if self._weights else None
