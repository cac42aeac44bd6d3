"""GGUF files in float32: the weights that transformers unpacks, and a cache of the rest that is rebuilt if damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from shelf import load, refusal
from tiny import tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf

from sampling import autoregressive_generate
from utils.artifact_cache import LOCK, MANIFEST
from utils.errors import UserError
from utils.models import gguf_model
from utils.models.checkpoints import load_model, load_tokenizer
from utils.models.memory import Placement
from utils.models.sources import locate

SILENT = Placement("cpu", torch.float32, lambda line: None)
TEXTS = ("two  words", "a<|im_end|>b", "é ☃ \n\t", "ab ab", "1234")


@pytest.fixture
def file(tmp_path: Path, own_cache: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=300), tiny_tokenizer())


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list that grows each time when a file is unpacked into the cache."""
    folders: list[Path] = []
    unpack = gguf_model._unpack
    monkeypatch.setattr(
        gguf_model,
        "_unpack",
        lambda source, reader, folder, model: (folders.append(folder), unpack(source, reader, folder, model)),
    )
    return folders


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "gguf").iterdir())


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_texts_are_those_of_the_model_that_transformers_loads(file: Path, unpacked: list[Path], weights: str) -> None:
    source = locate(str(file), print)
    direct, tokenizer = load_model(source, "none", SILENT), load_tokenizer(source)
    pairs = [load(file, file, engine_weights=weights) for _ in range(2)]
    assert len(unpacked) == 1
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    expected = [autoregressive_generate(ids, direct, 8, eos_tokens_id=pairs[0].end_ids) for ids in prompts]
    for pair in pairs:
        assert (pair.target_name, pair.drafter_name, pair.dtype) == ("tiny.gguf", "tiny.gguf", "float32")
        assert pair.tokenizer.get_vocab() == tokenizer.get_vocab()
        assert pair.tokenizer.chat_template == tokenizer.chat_template
        assert [pair.tokenizer(text).input_ids for text in TEXTS] == prompts
        texts = [autoregressive_generate(ids, pair.target, 8, eos_tokens_id=pair.end_ids) for ids in prompts]
        assert pair.end_ids == pairs[0].end_ids and texts == expected


def test_a_number_format_other_than_float32_is_unpacked(file: Path) -> None:
    pair = load(file, "layers:1", dtype="bfloat16")
    assert pair.dtype == "bfloat16" and not any(part.is_meta for part in pair.target.parameters())


def damage(folder: Path, how: str) -> None:
    if how == "empty file":
        os.truncate(folder / "model.safetensors", 0)
    elif how == "missing file":
        (folder / "tokenizer.json").unlink()
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    elif how == "different origin":
        text = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(text | {"made_from": "another file"}))
    else:
        shutil.rmtree(folder)
        folder.write_text("in the way")


@pytest.mark.parametrize("how", ["empty file", "missing file", "no manifest", "different origin", "file, not a folder"])
def test_a_damaged_entry_is_rebuilt(file: Path, unpacked: list[Path], how: str, own_cache: Path) -> None:
    load(file)
    (folder,) = entries(own_cache)
    intact = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder, how)
    load(file)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == intact
    assert len(unpacked) == 2 and entries(own_cache) == [folder] and folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("stop", [KeyboardInterrupt, UserError("stopped")])
def test_an_interrupted_preparation_leaves_nothing(
    file: Path, own_cache: Path, stop: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise stop

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, UserError)):
        patch.setattr(gguf_model, "_unpack", interrupted)
        load(file)
    assert entries(own_cache) == []
    load(file)
    assert (entries(own_cache)[0] / MANIFEST).is_file()


def test_a_changed_file_is_prepared_again_and_what_killed_runs_left_is_removed(
    file: Path, unpacked: list[Path], own_cache: Path
) -> None:
    load(file)
    (first,) = entries(own_cache)
    killed = first.parent / f"{first.name}.new-killed"
    (killed / "made").mkdir(parents=True)
    (killed / LOCK).touch()
    write_gguf(file, tiny_llama(1, vocab_size=300), tiny_tokenizer())
    os.utime(file, ns=(0, 10**18))
    pair = load(file)
    (second,) = entries(own_cache)
    assert first != second and len(unpacked) == 2
    assert torch.equal(pair.target.lm_head.weight, tiny_llama(1, vocab_size=300).lm_head.weight)


def test_a_model_that_does_not_fit_into_memory_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.models.memory.free_bytes", lambda device: 1000)
    assert "memory" in refusal(file) and "memory" in refusal(file, dtype="bfloat16")


def test_a_cache_that_cannot_be_written_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in the way").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "in the way"))
    assert "XDG_CACHE_HOME" in refusal(file)
