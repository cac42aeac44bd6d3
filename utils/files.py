"""Atomic file replacement, and the user's folders for cache, config and state."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

DEFAULT_FOLDERS = {"cache": ".cache", "config": ".config", "state": ".local/state"}
PRIVATE_FILE = 0o600


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary file in the folder of `path` that replaces `path` when the block ends without an error.

    After an error or an interruption the temporary file is removed and `path` is unchanged. private: only the owner may
    read the new file. Raises OSError if the file cannot be created or renamed.
    """
    # In the same folder, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        # The mode is set before anything is written. The umask applies to 0o666, as for any new file.
        temporary.touch(mode=PRIVATE_FILE if private else 0o666, exist_ok=False)
        yield temporary
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C included
        temporary.unlink(missing_ok=True)
        raise


def user_folder(kind: Literal["cache", "config", "state"]) -> Path:
    """`$XDG_<KIND>_HOME/speculative-decoding`, by default below the home folder. It may not exist yet."""
    base = Path(os.environ.get(f"XDG_{kind.upper()}_HOME", ""))
    # The XDG Base Directory specification says that relative paths must be ignored.
    return (base if base.is_absolute() else Path.home() / DEFAULT_FOLDERS[kind]) / "speculative-decoding"
