"""Cached folders: an answer that was asked for early is used once, and damage is found all the same."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from utils import artifact_cache
from utils.artifact_cache import MANIFEST, build_folder, check_early, is_intact

ORIGIN = "a test"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with build_folder(tmp_path / "folder", ORIGIN) as path:
        path.mkdir()
        (path / "weights").write_text("0123")
    return tmp_path / "folder"


def test_an_early_answer_holds_once_and_for_the_origin_that_was_checked(folder: Path) -> None:
    with mock.patch.object(artifact_cache, "digest", wraps=artifact_cache.digest) as digests:
        check_early(folder, ORIGIN)
        assert is_intact(folder, ORIGIN) and digests.call_count == 1, "the early answer was used"
        assert is_intact(folder, ORIGIN) and digests.call_count == 2, "later answers are new"
        check_early(folder, ORIGIN)
        assert not is_intact(folder, "another")


@pytest.mark.parametrize("early", [False, True])
def test_changed_files_are_found(folder: Path, early: bool) -> None:
    (folder / "weights").write_text("changed")
    if early:
        check_early(folder, ORIGIN)
    assert not is_intact(folder, ORIGIN)


@pytest.mark.parametrize("content", [b"", b"[1]", b"3", b"{}", b"\xff", b"[" * 100_000])
def test_a_folder_with_a_damaged_manifest_is_not_intact(content: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(content)
    assert not is_intact(folder, ORIGIN)
