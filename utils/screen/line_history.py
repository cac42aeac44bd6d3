"""The lines that were typed, kept from one session to the next in a file that only their owner can read.

What cannot be kept is said once; typing goes on.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


def history_path() -> Path:
    """`$XDG_STATE_HOME/speculative-decoding/history`, by default below ~/.local/state."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The base directory specification says to ignore a relative path.
    return (given if given.is_absolute() else Path.home() / ".local" / "state") / "speculative-decoding" / "history"


class LineHistory(FileHistory):
    """prompt_toolkit's file of lines; warn: hears why it cannot be read or written, once."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._path, self._warn = path, warn
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
            path.touch(mode=PRIVATE_FILE)
            path.chmod(PRIVATE_FILE)
        except OSError as error:
            self._give_up("kept", error)

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError as error:
            self._give_up("read", error)
            return []

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            self._give_up("kept", error)

    def _give_up(self, what: str, error: OSError) -> None:
        warn, self._warn = self._warn, lambda text: None
        warn(f"Typed lines cannot be {what} in {self._path} ({error.strerror}); this session remembers them itself.")


def recent(path: Path, count: int) -> list[str]:
    """The last lines that were kept, the oldest first; none where there is no such file."""
    lines = LineHistory(path, lambda text: None).load_history_strings() if path.is_file() else ()
    return list(lines)[:count][::-1]  # prompt_toolkit hands out the newest first
