"""Room for a model, in memory and on the disk, is looked for before it is read or fetched; what arrived is compared with its name."""

from __future__ import annotations

import hashlib
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

from utils.errors import UserError
from utils.models import hub
from utils.models import memory as room
from utils.models.sources import Source, locate

DTYPES = (torch.float32, torch.bfloat16)


def small_machine(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))


def test_what_is_counted_is_what_is_loaded(shelf: Path) -> None:
    for name, dtype in (("target", "float32"), ("half", "float32"), ("half", "bfloat16")):
        counts = room.weight_counts(Source(str(shelf / name), name))
        held = sum(part.nbytes for part in load(shelf / name, dtype=dtype).target.parameters())
        assert room.needed_bytes(counts, getattr(torch, dtype), "none") == held


def test_shards_are_counted_once_and_other_files_not(shelf: Path, tmp_path: Path) -> None:
    weights = load_file(shelf / "target" / "model.safetensors")
    names = sorted(weights)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, tmp_path / file)
    shutil.copy(shelf / "target" / "model.safetensors", tmp_path / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert room.weight_counts(Source(str(tmp_path), "x")) == {"F32": sum(part.numel() for part in weights.values())}
    (tmp_path / "one.safetensors").write_bytes(b"no such thing")
    assert room.weight_counts(Source(str(tmp_path), "x")) == {}


def test_packed_weights_stay_as_they_are_and_bitsandbytes_makes_smaller_ones() -> None:
    counts = {"F32": 100, "I32": 10, "U8": 7, "F8_E4M3": 3}
    assert [room.needed_bytes(counts, dtype, "none") for dtype in DTYPES] == [450, 250]
    assert room.needed_bytes(counts, "auto", "int8") == 450
    assert [room.needed_bytes({"BF16": 100}, torch.float32, kind) for kind in ("int4", "bnb-int8", "nf4")] == [
        400,
        100,
        50,
    ]


@pytest.mark.parametrize(
    ("share", "remedy"),
    [
        (0.7, "--dtype bfloat16"),
        (0.4, "--quantize bnb-int8"),
        (0.2, "--quantize nf4"),
        (0.1, "take a smaller model, or another --device"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, share: float, remedy: str
) -> None:
    full = room.needed_bytes(room.weight_counts(Source(str(shelf / "target"), "")), torch.float32, "none")
    small_machine(monkeypatch, int(share * full))
    said = refusal(shelf / "target")
    assert remedy in said and "are free" in said
    small_machine(monkeypatch, full)
    assert load(shelf / "target").memory >= full


def test_the_limit_of_a_container_counts_and_files_in_memory_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit, usage, stat = (tmp_path / name for name in ("max", "current", "stat"))
    monkeypatch.setattr(room, "CONTROL_GROUPS", ((str(limit), str(usage), str(stat)), ("/none", "/none", "/none")))
    small_machine(monkeypatch, 10_000)
    assert room.free_bytes("cpu") == 10_000
    usage.write_text("900\n")
    stat.write_text("anon 500\ninactive_file 300\nactive_file 50\n")
    limit.write_text("max\n")
    assert room.free_bytes("cpu") == 10_000
    limit.write_text("1000\n")
    assert room.free_bytes("cpu") == 1000 - 900 + 350
    limit.write_text("100\n")
    assert room.free_bytes("cpu") == 0


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that knows one model, and an empty cache."""
    files = {
        "model.safetensors": 3_000_000,
        "tokenizer.json": 1_000_000,
        "pytorch_model.bin": 10**15,
        "original/x.safetensors": 10**15,
    }
    told = SimpleNamespace(
        sha="abc",
        siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files.items()],
        safetensors=SimpleNamespace(parameters={"BF16": 10**15}),
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: told)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_, **__: None)
    return tmp_path / "cache"


def test_what_will_be_fetched_is_told_in_bytes(reachable: Path) -> None:
    told: list[str] = []
    source = locate("some/model", told.append)
    assert told == [f"fetching some/model, 4 MB in 2 files, to {reachable} ..."]
    assert room.weight_counts(source) == {"BF16": 10**15}
    assert "needs 4000000 GB" in refusal("some/model")  # nothing was fetched


def test_a_full_disk_is_told_before_anything_is_fetched(reachable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3_999_999))
    assert "takes 4 MB" in refusal("some/model") and "set HF_HOME" in refusal("some/model")


def arrive(blobs: Path, data: bytes, *, flawed: bool) -> list[Path]:
    """A large file and a small one, as the hub's client keeps them."""
    names = (hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())
    for name in names:
        (blobs / name).write_bytes(data + b"?" * flawed)
    return [blobs / name for name in names]


def test_what_arrives_damaged_is_dropped_and_said(reachable: Path) -> None:
    blobs = reachable / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    old = arrive(blobs, b"fetched before", flawed=True)
    with hub.sound("some/model"):
        good = [*arrive(blobs, b"fine", flawed=False), blobs / "named-otherwise"]
        good[-1].write_bytes(b"")
    with pytest.raises(UserError, match="'some/model' arrived damaged \\(2 of its files"), hub.sound("some/model"):
        bad = arrive(blobs, b"not fine", flawed=True)
    assert all(path.exists() for path in old + good) and not any(path.exists() for path in bad)
    with pytest.raises(UserError, match="arrived damaged"), hub.sound("some/model"):
        arrive(blobs, b"not fine", flawed=True)
        raise ValueError("what loading it came to")


def test_a_disk_that_fills_up_on_the_way_is_one_sentence(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    assert "the disk is full" in refusal(shelf / "target")
