"""Files of users: read with bounds, written completely or not at all, and replaced only on request.

Also the user's folders for cache, config and state. Nothing heavy is imported.
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from utils.errors import UserError

DEFAULT_FOLDERS = {"cache": ".cache", "config": ".config", "state": ".local/state"}
PRIVATE_FILE = 0o600
HEADER = 1 << 16  # bytes of a large file that identify it
MAX_TEXT_BYTES = 256_000_000  # a device such as /dev/zero never ends


def read_text(path: Path, what: str = "") -> str:
    """The text of a UTF-8 file without a byte order mark. Line ends are kept, so that only "\\n" separates lines.

    Messages call the file `what`, such as "The config file". Raises UserError if it cannot be read.
    """
    name = f"{what} {path}".strip()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:  # a zero byte in the name is a ValueError
        raise UserError(f"{name} cannot be read: {os_reason(error)}.") from error
    if len(data) > MAX_TEXT_BYTES:
        raise UserError(f"{name} is larger than {MAX_TEXT_BYTES // 1_000_000} MB: use a smaller file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} cannot be read: it is not UTF-8 text.") from error


def os_reason(error: Exception) -> str:
    """Why the operating system refused something, without the path that most messages repeat."""
    return getattr(error, "strerror", None) or str(error).rstrip(".")


def check_regular(path: Path) -> None:
    """Raise OSError unless the path is a regular file that can be opened: reading a pipe could wait without an end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    path.open("rb").close()


def write_file(path: Path, content: bytes, *, overwrite: bool) -> None:
    """Write a file, whole or not at all. Raises UserError if it cannot be written, or may not be replaced."""
    try:
        with replacing(path, overwrite=overwrite) as file:
            file.write(content)
    except FileExistsError as error:
        raise UserError(f"{path} already exists: choose a different name, or add the word 'overwrite'.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {os_reason(error)}. Choose a different place.") from error


@contextmanager
def replacing(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends without an error.

    Only regular files are replaced, never devices, pipes or folders. A new file has the mode that the umask gives, and
    a replaced file keeps its mode. Raises OSError if the file cannot be created, FileExistsError if it exists and
    `overwrite` is False.
    """
    # A link stays a link, and the file that it names is replaced.
    path = Path(os.path.realpath(path)) if overwrite else path
    mode = _replaceable_mode(path, overwrite=overwrite)
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
        _replaceable_mode(path, overwrite=overwrite)  # it may have appeared meanwhile
        os.replace(part, path)
    except BaseException:  # Ctrl-C included
        with suppress(OSError):
            part.unlink()
        raise


def _replaceable_mode(path: Path, *, overwrite: bool) -> int | None:
    """The mode of the file to be replaced, or None if there is none. Raises OSError if it must not be replaced."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if not overwrite and (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return stat.S_IMODE(mode)


def user_folder(kind: Literal["cache", "config", "state"]) -> Path:
    """`$XDG_<KIND>_HOME/speculative-decoding`, by default below the home folder. It may not exist yet."""
    base = Path(os.environ.get(f"XDG_{kind.upper()}_HOME", ""))
    # The XDG Base Directory specification says that relative paths must be ignored.
    return (base if base.is_absolute() else Path.home() / DEFAULT_FOLDERS[kind]) / "speculative-decoding"


def file_state(path: Path) -> str:
    """Return a line that identifies the contents of a large file without reading all of it: its path, size, times and
    inode, and a digest of its first bytes, which hold the header of a safetensors or GGUF file.
    """
    path = path.resolve()
    status = path.stat()
    with path.open("rb") as file:
        header = hashlib.sha256(file.read(HEADER)).hexdigest()[:16]
    times = f"{status.st_mtime_ns}, {status.st_ctime_ns}"
    return f"{path}, {status.st_size} bytes, {times}, inode {status.st_ino}, {header}"


def has_changed(path: Path, state: str) -> bool:
    """Whether a file has changed since its `file_state` was read. It may be gone."""
    try:
        return file_state(path) != state
    except OSError:
        return True
