"""Files are written whole or not at all, and the user's folders follow the XDG Base Directory specification."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from paths import ROOT

from utils import files
from utils.errors import UserError
from utils.files import read_text, replacing, user_folder, write_file


def test_a_file_is_replaced_only_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write(b"new")
        temporary.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as temporary:
        temporary.write(b"half")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError), replacing(folder) as temporary:
        temporary.write(b"new")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_missing_folder_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "missing" / "file"):
        pytest.fail("the block must not run")


def test_new_files_follow_the_umask_and_replaced_ones_keep_their_mode(tmp_path: Path) -> None:
    path, before = tmp_path / "file", os.umask(0o027)
    try:
        write_file(path, b"x", overwrite=False)
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o600)
        write_file(path, b"y", overwrite=True)
        assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == b"y"
    finally:
        os.umask(before)


def test_an_existing_file_is_replaced_only_on_demand(tmp_path: Path) -> None:
    path, link, gone = tmp_path / "file", tmp_path / "link", tmp_path / "gone"
    path.write_text("old")
    link.symlink_to(path)
    gone.symlink_to(tmp_path / "nothing")
    for name in (path, link, gone):
        with pytest.raises(UserError, match="overwrite"):
            write_file(name, b"new", overwrite=False)
    assert path.read_text() == "old" and not (tmp_path / "nothing").exists()
    write_file(link, b"new", overwrite=True)
    assert path.read_text() == "new" and link.is_symlink(), "a link stays a link"


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileExistsError), replacing(path, overwrite=False) as temporary:
        temporary.write(b"mine")
        path.write_text("theirs")
    assert path.read_text() == "theirs" and list(tmp_path.iterdir()) == [path]


def test_killing_the_program_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    code = (
        "import os, pathlib, sys; from utils.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1]) / 'file') as file:\n"
        "    file.write(b'x' * 10**6); file.flush(); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL and (tmp_path / "file").read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode: open("/dev/full", "wb"))  # noqa: SIM115
        patch.setattr(os, "fchmod", lambda descriptor, mode: None)
        with pytest.raises(UserError, match="No space left"):
            write_file(path, b"new" * 10_000, overwrite=True)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="Permission denied"):
            write_file(tmp_path / "file", b"new", overwrite=True)
    finally:
        tmp_path.chmod(0o700)


def test_reading_has_bounds_and_keeps_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes("\ufeffa\r\nb\rc\u2028d\n".encode())
    assert read_text(path) == "a\r\nb\rc\u2028d\n"
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 10)
    for bad in (Path("/dev/zero"), tmp_path, tmp_path / "none", tmp_path / "a\0b", path):
        with pytest.raises(UserError) as refused:
            read_text(bad)
        assert str(refused.value).count(str(bad)) == 1


@pytest.mark.parametrize(("kind", "default"), [("cache", ".cache"), ("config", ".config"), ("state", ".local/state")])
def test_user_folders(kind: str, default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path / "base"))
    assert user_folder(kind) == tmp_path / "base" / "speculative-decoding"  # type: ignore[arg-type]
    for value in ("", "relative/folder"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", value)
        assert user_folder(kind) == tmp_path / "home" / default / "speculative-decoding"  # type: ignore[arg-type]


def test_tests_use_no_folder_of_the_user() -> None:
    own = Path(os.environ["TESTS_HOME"])
    assert all(own in user_folder(kind).parents for kind in ("cache", "config", "state"))  # type: ignore[arg-type]
    assert own in Path(huggingface_hub.constants.HF_HOME).parents


@pytest.mark.parametrize("kind", ["cache", "config", "state"])
def test_no_test_can_find_the_folders_of_the_user(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in this process nor in one that it starts, whichever variables a test removes."""
    monkeypatch.delenv(f"XDG_{kind.upper()}_HOME")
    code = f"from utils.files import user_folder; print(user_folder({kind!r}), end='')"
    started = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for folder in (user_folder(kind), Path(started), Path("~").expanduser()):
        assert folder.is_relative_to(os.environ["TESTS_HOME"])
