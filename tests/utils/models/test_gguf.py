"""A GGUF file is converted once. A cached conversion gives the same texts, and a damaged one is never used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf

from sampling import autoregressive_generate
from utils.artifact_cache import MANIFEST
from utils.errors import UserError
from utils.models import gguf_model as gguf_files
from utils.models.checkpoints import load_model, load_tokenizer
from utils.models.devices import Placement
from utils.models.gguf_model import convert_if_gguf
from utils.models.sources import Source, locate
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PairRequest

SILENT = Placement("cpu", torch.float32, lambda line: None)
TEXTS = ("two  words", "a<|im_end|>b", "é ☃ \n\t", "ab ab", "1234")


@pytest.fixture
def file(tmp_path: Path, own_cache: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=300), tiny_tokenizer())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list that grows with each conversion."""
    folders: list[Path] = []
    convert = gguf_files.convert

    def counted(source: Source, folder: Path, where: Placement) -> None:
        folders.append(folder)
        convert(source, folder, where)

    monkeypatch.setattr(gguf_files, "convert", counted)
    return folders


def cached(file: Path, where: Placement = SILENT) -> Path:
    return Path(convert_if_gguf(locate(str(file), print), where).location)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "gguf").iterdir())


def test_the_conversion_gives_the_same_texts(file: Path, conversions: list[Path]) -> None:
    direct = load_model(locate(str(file), print), "none", SILENT)
    lines: list[str] = []
    texts = []
    for _ in range(2):
        pair = load_pair(PairRequest(str(file), str(file), device="cpu"), lines.append)
        assert (pair.target_name, pair.drafter_name, pair.dtype) == ("tiny.gguf", "tiny.gguf", "float32")
        prompts = [pair.tokenizer(text).input_ids for text in TEXTS]
        texts.append([autoregressive_generate(ids, pair.target, 24, eos_tokens_id=pair.end_ids) for ids in prompts])
        for name, weight in direct.state_dict().items():
            assert torch.equal(pair.target.state_dict()[name], weight)
    assert (
        texts[0]
        == texts[1]
        == [autoregressive_generate(ids, direct, 24, eos_tokens_id=pair.end_ids) for ids in prompts]
    )
    assert len(conversions) == 1 and sum("converting tiny.gguf" in line for line in lines) == 1


def test_the_tokenizer_and_the_generation_settings_are_converted(file: Path) -> None:
    source = locate(str(file), print)
    ours, theirs = load_tokenizer(convert_if_gguf(source, SILENT)), load_tokenizer(source)
    assert ours is not None and theirs is not None
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert [ours(text).input_ids for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    assert [ours.decode(ours(text).input_ids) for text in TEXTS] == [
        theirs.decode(theirs(text).input_ids) for text in TEXTS
    ]
    models = [load_model(each, "none", SILENT) for each in (convert_if_gguf(source, SILENT), source)]
    configs = [model.config.to_dict() | {"_name_or_path": "", "architectures": None} for model in models]
    assert configs[0] == configs[1]
    assert models[0].generation_config.eos_token_id == models[1].generation_config.eos_token_id


def damage(folder: Path, how: str) -> None:
    if how == "empty file":
        os.truncate(folder / "model.safetensors", 0)
    elif how == "missing file":
        (folder / "tokenizer.json").unlink()
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    elif how == "manifest is a list":
        (folder / MANIFEST).write_text("[]")
    elif how == "different origin":
        text = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(text | {"made_from": "another file"}))
    else:
        shutil.rmtree(folder)
        folder.write_text("in the way")


@pytest.mark.parametrize(
    "how",
    [
        "empty file",
        "missing file",
        "no manifest",
        "manifest is a list",
        "different origin",
        "file instead of folder",
    ],
)
def test_a_damaged_entry_is_rebuilt(file: Path, conversions: list[Path], how: str, own_cache: Path) -> None:
    folder = cached(file)
    intact = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder, how)
    lines: list[str] = []
    assert cached(file, Placement("cpu", torch.float32, lines.append)) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == intact
    assert len(conversions) == 2 and len(lines) == 1 and len(entries(own_cache)) == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, UserError])
def test_an_interrupted_conversion_leaves_nothing(
    file: Path, own_cache: Path, stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Source, folder: Path, where: Placement) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise stop

    with monkeypatch.context() as patch, pytest.raises(stop):
        patch.setattr(gguf_files, "convert", interrupted)
        cached(file)
    assert entries(own_cache) == []
    assert (cached(file) / MANIFEST).is_file()


def test_a_changed_file_is_converted_again(file: Path, conversions: list[Path], own_cache: Path) -> None:
    first = cached(file)
    write_gguf(file, tiny_llama(1, vocab_size=300), tiny_tokenizer())
    os.utime(file, ns=(0, 10**18))
    second = cached(file)
    assert first != second and entries(own_cache) == [second.name] and len(conversions) == 2
    weights = load_model(Source(str(second), "tiny"), "none", SILENT).state_dict()
    assert torch.equal(weights["lm_head.weight"], tiny_llama(1, vocab_size=300).lm_head.weight)


def test_what_killed_conversions_left_is_removed_although_the_entry_is_whole(file: Path, own_cache: Path) -> None:
    entry = cached(file)
    for name in (entry.name, "an older state of the file", "another file"):
        killed = entry.parent / f"{name}.new-killed"
        (killed / "made").mkdir(parents=True)
        os.utime(killed, (0, 0))
    assert cached(file) == entry and entries(own_cache) == [entry.name]


def test_number_formats_and_versions_have_their_own_entries(
    file: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cached(file)
    half = cached(file, Placement("cpu", torch.bfloat16, print))
    assert load_model(Source(str(half), "half"), "none", Placement("cpu", "auto", print)).dtype == torch.bfloat16
    monkeypatch.setattr(gguf_files.transformers, "__version__", "6.0.0")
    third = cached(file)
    assert len({first, half, third}) == len(conversions) == 3
    monkeypatch.undo()


def test_two_files_with_the_same_name_have_two_entries(file: Path, tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "other").mkdir()
    shutil.copy2(file, tmp_path / "other" / file.name)
    assert cached(file) != cached(tmp_path / "other" / file.name) and len(entries(own_cache)) == 2


def note_about(file: Path) -> str:
    """The note of a load that cannot cache anything and still works."""
    lines: list[str] = []
    pair = load_pair(PairRequest(str(file), "layers:1", device="cpu"), lines.append)
    assert pair.target(torch.tensor([[1, 2]])).logits.isfinite().all()
    (note,) = [line for line in lines if gguf_files.NOT_CACHED in line]
    assert "\n" not in note and "tiny.gguf" in note
    return note


def test_too_little_disk_space_is_a_note(file: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "SIZE_MARGIN", 1e12)
        assert " free" in note_about(file) and entries(own_cache) == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), gguf_files.SafetensorError("I/O error: No space left on device")]
)
def test_a_disk_that_becomes_full_is_a_note(
    file: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(self: Any, folder: Path) -> None:
        folder.mkdir()
        raise error

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    assert "No space left on device" in note_about(file) and entries(own_cache) == []


def test_a_cache_that_cannot_be_written_is_a_note(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in the way").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "in the way"))
    assert "Not a directory" in note_about(file)


def test_an_entry_is_readable_only_by_its_owner(file: Path) -> None:
    assert cached(file).stat().st_mode & 0o077 == 0


def test_other_sources_are_not_converted(tmp_path: Path) -> None:
    source = Source(str(tmp_path), "folder")
    assert convert_if_gguf(source, SILENT) is source
