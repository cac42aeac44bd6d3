"""One sentence for everything that can be wrong with a checkpoint, a path or an id, and silence while loading."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf
from transformers import ViTConfig
from transformers.utils import logging as transformers_logging

from utils.errors import UserError
from utils.models import checkpoints, sources
from utils.models.load_errors import CAUSES, explained_errors, quiet
from utils.models.sources import locate

GATED, TOKEN, UNKNOWN_ID, OFFLINE, REMOTE_CODE, PICKLED, SHAPES, MEMORY = CAUSES  # sentences in the order of the table


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def truncate_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def remove_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def remove_the_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def require_remote_code(folder: Path) -> None:
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own"})
    (folder / "code.py").write_text("raise SystemExit('remote code was run')")


def become_a_vision_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(ViTConfig().to_dict()))


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (truncate_weights, "could not be loaded"),
    (pickle_weights, "pickled"),
    (lambda folder: (folder / "model.safetensors").unlink(), ".safetensors"),
    (remove_a_weight, "(model.layers.0.mlp.up_proj.weight"),
    (lambda folder: edit_config(folder, hidden_size=64), SHAPES),
    (lambda folder: (folder / "config.json").unlink(), "config.json"),
    (lambda folder: (folder / "config.json").write_text("{oops"), "JSON"),
    (lambda folder: edit_config(folder, model_type="unheard-of"), "unheard-of"),
    (require_remote_code, REMOTE_CODE),
    (become_a_vision_model, "ViT"),
    (remove_the_tokenizer, "tokenizer.json"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "could not be loaded"),
]


@cache
def loads(folder: Path) -> bool:
    return load(folder).target is not None


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[words for _, words in DAMAGES])
def test_damaged_folders(shelf: Path, tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(shelf / "drafter", folder)
    assert loads(shelf / "drafter")
    damage(folder)
    sentence = refusal(folder)
    assert words in sentence and "damaged'" in sentence


def test_optional_remote_code_is_not_run(shelf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(shelf / "target", folder)
    edit_config(folder, auto_map={"AutoModelForCausalLM": "code.Own"})
    (folder / "code.py").write_text("raise SystemExit('remote code was run')")
    pair = load(folder, "layers:1")
    assert type(pair.target).__module__.startswith("transformers.") and "Python code" in pair.notes[0]


def test_the_message_about_a_folder_names_its_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "model.gguf") in refusal(tmp_path)


def test_a_gguf_file(tmp_path: Path, own_cache: Path) -> None:
    model, tokenizer = tiny_llama(vocab_size=300, num_hidden_layers=3), tiny_tokenizer()
    pair = load(write_gguf(tmp_path / "tiny.gguf", model, tokenizer), "layers:2")
    ids = torch.tensor([[1, 2, 3]])
    similarity = torch.cosine_similarity(pair.target(ids).logits, model(ids).logits, dim=-1)
    assert similarity.min() > 0.99 and type(pair.target.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert (pair.target_name, pair.drafter_kind, pair.dtype) == ("tiny.gguf", "layers:2", "float32")
    assert pair.end_ids == {tokenizer.eos_token_id} and pair.tokenizer.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("name", ["model.bin", "bad.gguf"])
def test_files_that_are_not_gguf(tmp_path: Path, own_cache: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF" + bytes(100))
    sentence = refusal(tmp_path / name)
    assert name in sentence and "GGUF file" in sentence


def test_paths_that_do_not_exist() -> None:
    for word in ("./missing", "/missing/folder", "~/missing", "missing.gguf", "a/b/c", "", " "):
        sentence = refusal(word)
        assert f"'{word}'" in sentence and "ID@REVISION" in sentence


def test_words_that_are_not_a_hub_id() -> None:
    assert UNKNOWN_ID in refusal("not a model")


def test_an_unknown_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert OFFLINE in refusal("nobody/no-such-model")


class ConnectError(OSError):
    """Recognised by its class name, as the error of the hub's client."""


class GatedRepoError(OSError):
    """Likewise."""


class RepositoryNotFoundError(OSError):
    """Likewise."""


@pytest.mark.parametrize("cached", [False, True])
def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """The client would retry for half a minute. A cached copy is used as it is."""
    requests: list[tuple[str, str | None]] = []
    lines: list[str] = []

    def fail(self: Any, name: str, *, revision: str | None, timeout: float, files_metadata: bool) -> None:
        requests.append((name, revision))
        raise ConnectError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", fail)
    monkeypatch.setattr(sources, "try_to_load_from_cache", lambda *_, **__: "/cache/config.json" if cached else None)
    if cached:
        source = locate("some/model@v1", lines.append)
        assert source.arguments == {"trust_remote_code": False, "revision": "v1", "local_files_only": True}
        assert len(lines) == 1 and "some/model@v1" in lines[0]
    else:
        assert OFFLINE in refusal("some/model@v1")
    assert requests == [("some/model", "v1")]


@pytest.mark.parametrize(
    ("error", "words"),
    [(RepositoryNotFoundError("404"), UNKNOWN_ID), (OSError("401: Invalid credentials"), TOKEN)],
)
def test_errors_of_the_hub(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", fail)
    assert words in refusal("some/model@v9")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("403"), GATED),
        (RepositoryNotFoundError("404"), UNKNOWN_ID),
        (torch.OutOfMemoryError("CUDA out of memory"), MEMORY),
        (MemoryError(), MEMORY),
        (RuntimeError("You set `ignore_mismatched_sizes` to `False`, thus raising an error."), SHAPES),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MEMORY),
        (RuntimeError("something else\nwith details"), "(something else)"),
        (RuntimeError(), "(RuntimeError)"),
    ],
)
def test_other_errors_become_one_sentence(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        if isinstance(error, OSError):
            raise ValueError("what the library adds") from error
        raise error

    monkeypatch.setattr(checkpoints, "load_from_files", fail)
    assert words in refusal(shelf / "target")


def test_a_user_error_passes_unchanged() -> None:
    with pytest.raises(UserError, match=r"^mine$"), explained_errors("model"):
        raise UserError("mine")


def test_loading_is_silent_and_restores_what_it_silenced(shelf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.disable(logging.NOTSET)
    bars = transformers_logging.is_progress_bar_enabled()
    load(shelf / "target", shelf / "drafter")
    with pytest.raises(RuntimeError), quiet():
        warnings.warn("unseen", stacklevel=1)
        logging.getLogger("transformers").warning("unseen")
        sys.stderr.write("a progress bar that cannot be switched off")
        raise RuntimeError
    assert capfd.readouterr() == ("", "")
    assert (logging.root.manager.disable, transformers_logging.is_progress_bar_enabled()) == (logging.NOTSET, bars)


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16)])
def test_weights_that_are_not_finite(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    """One value, in a row of the embedding that few prompts would use."""
    model = tiny_llama(vocab_size=300).to(dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight[123, 4] = value
    save_folder(tmp_path / "model", model, tiny_tokenizer())
    assert "model.embed_tokens.weight" in refusal(tmp_path / "model")


def test_a_damaged_index_is_one_sentence(shelf: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shelf / "target", tmp_path / "changed")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    for index in ("[" * 100_000, '{"weight_map": ' * 100_000, "3", '{"weight_map": [[]]}'):
        (folder / "model.safetensors.index.json").write_text(index)
        assert "changed" in refusal(folder)


@pytest.mark.parametrize("outside", ["../target/model.safetensors", "{shelf}/target/model.safetensors", "a/../../b"])
def test_an_index_may_not_name_files_outside_of_its_folder(shelf: Path, tmp_path: Path, outside: str) -> None:
    folder = shutil.copytree(shelf / "target", tmp_path / "changed")
    shutil.copytree(shelf / "target", tmp_path / "target")
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, outside.format(shelf=shelf))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside" in refusal(folder)
