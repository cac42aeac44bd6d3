"""Cached folders: made from what they should be, with all their files, or not intact."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.artifact_cache import MANIFEST, build_folder, is_intact

ORIGIN = "a test"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with build_folder(tmp_path / "folder", ORIGIN, "A test") as path:
        path.mkdir()
        (path / "weights").write_text("0123")
    return tmp_path / "folder"


def test_a_folder_is_intact_for_its_origin_only(folder: Path) -> None:
    assert is_intact(folder, ORIGIN) and not is_intact(folder, "another")


def test_missing_and_empty_files_are_found(folder: Path) -> None:
    (folder / "weights").write_text("")
    assert not is_intact(folder, ORIGIN)
    (folder / "weights").unlink()
    assert not is_intact(folder, ORIGIN)


@pytest.mark.parametrize("content", [b"", b"[1]", b"3", b"{}", b"\xff"])
def test_a_folder_with_an_unreadable_manifest_is_not_intact(content: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(content)
    assert not is_intact(folder, ORIGIN)
