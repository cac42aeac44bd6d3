"""Files are written whole or not at all, and the user's folders follow the XDG Base Directory specification."""

from pathlib import Path

import pytest

from utils.files import replacing, user_folder


def test_a_file_is_replaced_only_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path and path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_rename_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError), replacing(folder) as temporary:
        temporary.write_text("new")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_missing_folder_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "missing" / "file"):
        pytest.fail("the block must not run")


def test_a_private_file_is_readable_for_its_owner_only(tmp_path: Path) -> None:
    for private in (True, False):
        with replacing(tmp_path / "file", private=private) as temporary:
            temporary.write_bytes(b"x")
        mode = (tmp_path / "file").stat().st_mode & 0o777
        assert (mode == 0o600) == private


@pytest.mark.parametrize(("kind", "default"), [("cache", ".cache"), ("config", ".config"), ("state", ".local/state")])
def test_user_folders(kind: str, default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path / "base"))
    assert user_folder(kind) == tmp_path / "base" / "speculative-decoding"  # type: ignore[arg-type]
    for value in ("", "relative/folder"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", value)
        assert user_folder(kind) == tmp_path / "home" / default / "speculative-decoding"  # type: ignore[arg-type]
