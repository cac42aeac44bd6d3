"""Memory and disk space are checked before a model is loaded or downloaded, and downloads are verified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file
from shelf import load, refusal

from utils import freed_memory
from utils.models import memory, sources
from utils.models.sources import Source, locate
from utils.text import byte_size

DTYPES = (torch.float32, torch.bfloat16)


def set_free_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))


def test_the_estimate_is_what_is_loaded(shelf: Path) -> None:
    for name, dtype in (("target", "float32"), ("half", "float32"), ("half", "bfloat16")):
        counts = memory.weight_counts(Source(str(shelf / name), name))
        loaded = sum(part.nbytes for part in load(shelf / name, dtype=dtype).target.parameters())
        assert memory.needed_bytes(counts, getattr(torch, dtype), "none") == loaded


def test_weights_in_files_count_as_they_are_stored(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines keep 16 bits, so another format of 16 bits would not need less."""
    stored = memory.needed_bytes(memory.weight_counts(Source(str(shelf / "half"), "")), "auto", "none")
    set_free_memory(monkeypatch, stored - 1)
    assert byte_size(stored) in (sentence := refusal(shelf / "half")) and "--dtype" not in sentence
    set_free_memory(monkeypatch, stored)
    load(shelf / "half")


def test_each_shard_of_the_index_is_counted_once(shelf: Path, tmp_path: Path) -> None:
    weights = load_file(shelf / "target" / "model.safetensors")
    names = sorted(weights)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, tmp_path / file)
    shutil.copy(shelf / "target" / "model.safetensors", tmp_path / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert memory.weight_counts(Source(str(tmp_path), "x")) == {"F32": sum(part.numel() for part in weights.values())}
    (tmp_path / "one.safetensors").write_bytes(b"no such thing")
    assert memory.weight_counts(Source(str(tmp_path), "x")) == {}


def test_packed_weights_keep_their_size_and_bitsandbytes_shrinks_others() -> None:
    counts = {"F32": 100, "I32": 10, "U8": 7, "F8_E4M3": 3}
    assert [memory.needed_bytes(counts, dtype, "none") for dtype in DTYPES] == [450, 250]
    assert memory.needed_bytes(counts, "auto", "int8") == 450
    assert [memory.needed_bytes({"BF16": 100}, torch.float32, kind) for kind in ("int4", "bnb-int8", "nf4")] == [
        400,
        100,
        50,
    ]


@pytest.mark.parametrize(
    ("fraction", "remedy"),
    [
        (0.7, "--dtype bfloat16"),
        (0.4, "--engine-weights int8"),
        (0.2, "--engine-weights int4"),
        (0.1, "smaller model"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_a_smaller_form(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, fraction: float, remedy: str
) -> None:
    full = memory.needed_bytes(memory.weight_counts(Source(str(shelf / "target"), "")), torch.float32, "none")
    set_free_memory(monkeypatch, int(fraction * full))
    assert remedy in refusal(shelf / "target")
    set_free_memory(monkeypatch, full)
    assert load(shelf / "target").memory >= full


VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
VERSION_2 = ("memory.max", "memory.current", "")


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/", "", VERSION_2),
        ("0::/user.slice/run.scope", "user.slice/run.scope", VERSION_2),
        ("0::/user.slice/run.scope", "user.slice", VERSION_2),
        ("0::/of/the/host", "", VERSION_2),
        ("4:memory:/jobs/own", "memory/jobs/own", VERSION_1),
        ("4:cpu,memory:/jobs/own", "memory/jobs", VERSION_1),
        ("4:memory:/of/the/host", "memory", VERSION_1),
    ],
)
def test_limits_of_control_groups_count_and_cached_files_are_free(
    line: str, folder: str, names: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the group of the process, and of those above it."""
    (tmp_path / "own").write_text(f"12:cpuset:/other\n{line}\n")
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(freed_memory, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(freed_memory, "OWN_GROUPS", tmp_path / "own")
    limit, usage = (tmp_path / folder / name for name in names[:2])
    stat, prefix = tmp_path / folder / "memory.stat", names[2]
    set_free_memory(monkeypatch, 10_000)
    assert memory.free_bytes("cpu") == 10_000
    usage.write_text("900\n")
    stat.write_text(f"anon 500\n{prefix}inactive_file 300\n{prefix}active_file 50\n")
    limit.write_text("max\n" if names is VERSION_2 else "9223372036854771712\n")
    assert memory.free_bytes("cpu") == 10_000
    limit.write_text("1000\n")
    assert memory.free_bytes("cpu") == 1000 - 900 + 350
    limit.write_text("100\n")
    assert memory.free_bytes("cpu") == 0


@pytest.fixture
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of an empty cache, and a hub with one model."""
    files = {
        "model.safetensors": 3_000_000,
        "tokenizer.json": 1_000_000,
        "pytorch_model.bin": 10**15,
        "original/x.safetensors": 10**15,
    }
    info = SimpleNamespace(
        sha="abc",
        siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files.items()],
        safetensors=SimpleNamespace(parameters={"BF16": 10**15}),
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(sources, "try_to_load_from_cache", lambda *_, **__: None)
    return tmp_path / "cache"


def test_a_download_is_reported_with_its_size(hub_cache: Path) -> None:
    lines: list[str] = []
    source = locate("some/model", lines.append)
    assert len(lines) == 1 and "some/model" in lines[0] and byte_size(4_000_000) in lines[0]
    assert memory.weight_counts(source) == {"BF16": 10**15}
    assert byte_size(2 * 10**15) in refusal("some/model")  # refused before anything is downloaded


def test_a_full_disk_is_reported_before_a_download(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3_999_999))
    sentence = refusal("some/model")
    assert byte_size(4_000_000) in sentence and "HF_HOME" in sentence


def test_a_disk_that_becomes_full_is_one_sentence(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    assert "No space left on device" in refusal(shelf / "target")
