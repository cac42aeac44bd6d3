"""A GGUF file is converted once: what is kept gives the same texts, and none that is damaged, half written or of another file is used."""

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
from utils.errors import UserError
from utils.models import gguf as gguf_files
from utils.models.artifact_cache import MANIFEST
from utils.models.checkpoints import load_model, load_tokenizer
from utils.models.devices import Placement
from utils.models.gguf import converted
from utils.models.sources import Source, locate
from utils.pairs.load_pair import PairRequest, load_pair

SILENT = Placement("cpu", torch.float32, lambda line: None)
TEXTS = ("two  words", "a<|im_end|>b", "é ☃ \n\t", "ab ab", "1234")


@pytest.fixture
def file(tmp_path: Path, own_cache: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=300), tiny_tokenizer())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows with each conversion."""
    made: list[Path] = []
    convert = gguf_files._convert

    def counted(source: Source, folder: Path, where: Placement) -> None:
        made.append(folder)
        convert(source, folder, where)

    monkeypatch.setattr(gguf_files, "_convert", counted)
    return made


def kept(file: Path, where: Placement = SILENT) -> Path:
    return Path(converted(locate(str(file), print), where).place)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "gguf").iterdir())


def test_both_loads_give_the_same_texts(file: Path, conversions: list[Path]) -> None:
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
    assert len(conversions) == 1 and sum(line.startswith("converting tiny.gguf (once") for line in lines) == 1


def test_the_tokenizer_and_the_settings_come_along(file: Path) -> None:
    source = locate(str(file), print)
    ours, theirs = load_tokenizer(converted(source, SILENT)), load_tokenizer(source)
    assert ours is not None and theirs is not None
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert [ours(text).input_ids for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    assert [ours.decode(ours(text).input_ids) for text in TEXTS] == [
        theirs.decode(theirs(text).input_ids) for text in TEXTS
    ]
    models = [load_model(each, "none", SILENT) for each in (converted(source, SILENT), source)]
    configs = [model.config.to_dict() | {"_name_or_path": "", "architectures": None} for model in models]
    assert configs[0] == configs[1]
    assert models[0].generation_config.eos_token_id == models[1].generation_config.eos_token_id


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "truncated":
        os.truncate(weights, 5000)
    elif how == "a bit":
        data = bytearray(weights.read_bytes())
        data[-100] ^= 1
        weights.write_bytes(data)
    elif how == "a file":
        (folder / "tokenizer.json").unlink()
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    elif how == "no object":
        (folder / MANIFEST).write_text("[]")
    elif how == "of another":
        text = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(text | {"made_from": "another file"}))
    else:
        shutil.rmtree(folder)
        folder.write_text("in the way")


@pytest.mark.parametrize(
    "how", ["truncated", "a bit", "a file", "no manifest", "no object", "of another", "a file in the way"]
)
def test_a_damaged_entry_is_made_anew(file: Path, conversions: list[Path], how: str, own_cache: Path) -> None:
    folder = kept(file)
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    spoil(folder, how)
    lines: list[str] = []
    assert kept(file, Placement("cpu", torch.float32, lines.append)) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == sound
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
        patch.setattr(gguf_files, "_convert", interrupted)
        kept(file)
    assert entries(own_cache) == []
    assert (kept(file) / MANIFEST).is_file()


def test_a_changed_file_is_another_one(file: Path, conversions: list[Path], own_cache: Path) -> None:
    first = kept(file)
    write_gguf(file, tiny_llama(1, vocab_size=300), tiny_tokenizer())
    os.utime(file, ns=(0, 10**18))
    second = kept(file)
    assert first != second and entries(own_cache) == [second.name] and len(conversions) == 2
    weights = load_model(Source(str(second), "tiny"), "none", SILENT).state_dict()
    assert torch.equal(weights["lm_head.weight"], tiny_llama(1, vocab_size=300).lm_head.weight)


def test_a_format_and_a_library_of_their_own(
    file: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept(file)
    half = kept(file, Placement("cpu", torch.bfloat16, print))
    assert load_model(Source(str(half), "half"), "none", Placement("cpu", "auto", print)).dtype == torch.bfloat16
    monkeypatch.setattr(gguf_files.transformers, "__version__", "6.0.0")
    third = kept(file)
    assert len({first, half, third}) == len(conversions) == 3
    monkeypatch.undo()


def test_two_files_of_one_name(file: Path, tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "other").mkdir()
    shutil.copy2(file, tmp_path / "other" / file.name)
    assert kept(file) != kept(tmp_path / "other" / file.name) and len(entries(own_cache)) == 2


def note_of(file: Path) -> str:
    """The note of a load that goes on without keeping anything."""
    lines: list[str] = []
    pair = load_pair(PairRequest(str(file), "layers:1", device="cpu"), lines.append)
    assert pair.target(torch.tensor([[1, 2]])).logits.isfinite().all()
    (note,) = [line for line in lines if "could not be kept" in line]
    assert "\n" not in note and "tiny.gguf" in note
    return note


def test_no_space_is_a_note(file: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "ROOM", 1e12)
        assert "free," in note_of(file) and entries(own_cache) == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), gguf_files.SafetensorError("I/O error: No space left on device")]
)
def test_a_disk_that_fills_up_is_a_note(
    file: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(self: Any, folder: Path) -> None:
        folder.mkdir()
        raise error

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    assert "No space left on device" in note_of(file) and entries(own_cache) == []


def test_a_cache_that_cannot_be_written_is_a_note(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in the way").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "in the way"))
    assert "Not a directory" in note_of(file)


def test_it_is_private(file: Path) -> None:
    assert kept(file).stat().st_mode & 0o077 == 0


def test_other_sources_are_left_alone(tmp_path: Path) -> None:
    source = Source(str(tmp_path), "folder")
    assert converted(source, SILENT) is source
