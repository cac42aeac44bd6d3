"""The history of typed lines, stored between sessions in a file that only its owner can read.

If the file cannot be used, one warning is shown and the session keeps its own lines.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory

from utils.files import PRIVATE_FILE, user_folder
from utils.servers.address import may_hold_key

PRIVATE_FOLDER = 0o700


def history_path() -> Path:
    """`$XDG_STATE_HOME/speculative-decoding/history`, by default below ~/.local/state."""
    return user_folder("state") / "history"


class LineHistory(FileHistory):
    """The history file of prompt_toolkit. `warn` receives one message if the file cannot be read or written."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._path, self._warn = path, warn
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
            path.touch(mode=PRIVATE_FILE)
            # touch sets the mode of new files only.
            path.chmod(PRIVATE_FILE)
        except OSError as error:
            self._give_up("written", error)

    def load_history_strings(self) -> Iterable[str]:
        try:
            # A list, because the file would otherwise be read, and fail, outside the try block.
            return list(super().load_history_strings())
        except OSError as error:
            self._give_up("read", error)
            return []

    def store_string(self, string: str) -> None:
        if may_hold_key(string):  # typed instead of the name of its variable
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._give_up("written", error)

    def _give_up(self, action: str, error: OSError) -> None:
        warn, self._warn = self._warn, lambda text: None  # only the first failure is shown
        warn(f"The history file {self._path} cannot be {action} ({error.strerror}); this session keeps its own lines.")
