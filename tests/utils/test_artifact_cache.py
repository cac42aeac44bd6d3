"""Cached folders: which one is checked before anybody asks for it, and that damage is found all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from utils import artifact_cache
from utils.artifact_cache import MANIFEST, build_folder, check_newest_early, is_intact, mark_as_used


@pytest.fixture
def digests() -> Iterator[mock.Mock]:
    with mock.patch.object(artifact_cache, "digest", wraps=artifact_cache.digest) as counted:
        yield counted


def make(root: Path, name: str, age: float) -> Path:
    folder = root / name
    with build_folder(folder, f"origin of {name}") as path:
        path.mkdir()
        (path / "weights").write_text(name)
    os.utime(folder / MANIFEST, (1e9 - age, 1e9 - age))
    return folder


def checked(root: Path, digests: mock.Mock) -> list[str]:
    """The folders whose files an early check has read."""
    digests.reset_mock()
    check_newest_early(root)
    for thread, _ in artifact_cache._early.values():
        thread.join()
    return [call.args[0].parent.name for call in digests.call_args_list]


def test_the_folder_that_was_used_last_is_checked_early_and_once(tmp_path: Path, digests: mock.Mock) -> None:
    old, new = make(tmp_path, "old", 20), make(tmp_path, "new", 10)
    assert checked(tmp_path, digests) == ["new"]
    assert is_intact(new, "origin of new") and digests.call_count == 1, "the early answer was used"
    assert is_intact(new, "origin of new") and digests.call_count == 2, "later answers are new"
    mark_as_used(old)
    assert checked(tmp_path, digests) == ["old"]
    assert not is_intact(old, "origin of new"), "the answer holds for the origin that was checked"


def test_damage_is_found_early(tmp_path: Path, digests: mock.Mock) -> None:
    folder = make(tmp_path, "only", 0)
    (folder / "weights").write_text("changed")
    assert checked(tmp_path, digests) == ["only"] and not is_intact(folder, "origin of only")


@pytest.mark.parametrize("content", [b"", b"[1]", b"3", b"{}", b"\xff", b"[" * 100_000])
def test_a_damaged_manifest_is_not_checked(content: bytes, tmp_path: Path, digests: mock.Mock) -> None:
    folder = make(tmp_path, "only", 0)
    (folder / MANIFEST).write_bytes(content)
    assert checked(tmp_path, digests) == [] and not is_intact(folder, "origin of only")


def test_no_folder_is_no_error(tmp_path: Path, digests: mock.Mock) -> None:
    assert checked(tmp_path / "absent", digests) == []
    mark_as_used(tmp_path / "absent")
