"""Loading a pair: every source, every default, and a sentence for everything that can be wrong with a checkpoint."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny import save_folder, tiny_llama, tiny_mamba, tiny_t5, tiny_tokenizer
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, ViTConfig
from transformers.utils import logging as transformers_logging

from utils.errors import UserError
from utils.models.failures import explained, quiet
from utils.models.loading import Pair, PairRequest, load_pair
from utils.models.pairs import PAIRS


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folders by name."""
    root, tokenizer = tmp_path_factory.mktemp("shelf"), tiny_tokenizer()
    save_folder(root / "target", tiny_llama(vocab_size=300, num_hidden_layers=6), tokenizer)
    save_folder(root / "drafter", tiny_llama(1, vocab_size=300), tokenizer)
    save_folder(root / "padded", tiny_llama(1, vocab_size=320), tokenizer)
    save_folder(root / "bare", tiny_llama(1, vocab_size=300), None)
    save_folder(root / "narrow", tiny_llama(1, vocab_size=280), None)
    save_folder(root / "stranger", tiny_llama(1, vocab_size=300), tiny_tokenizer(299))
    save_folder(root / "single", tiny_llama(vocab_size=300, num_hidden_layers=1), tokenizer)
    save_folder(root / "t5", tiny_t5(vocab_size=300), tokenizer)
    save_folder(root / "mamba", tiny_mamba(vocab_size=300), tokenizer)
    save_folder(root / "half", tiny_llama(vocab_size=300).to(torch.bfloat16), tokenizer)
    return root


def load(target: Path | str, drafter: Path | str | None = None, **words: str) -> Pair:
    return load_pair(PairRequest(str(target), None if drafter is None else str(drafter), **{"device": "cpu"} | words), lambda line: None)


def refusal(target: Path | str, drafter: Path | str | None = None, **words: str) -> str:
    """The one sentence of a request that must fail."""
    with pytest.raises(UserError) as caught:
        load(target, drafter, **words)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def test_a_pair_of_folders(shelf: Path) -> None:
    lines: list[str] = []
    pair = load_pair(PairRequest(str(shelf / "target"), str(shelf / "drafter"), device="cpu"), lines.append)
    assert lines == ["loading target (cpu, float32) ...", "loading drafter (cpu, float32) ..."]
    assert (pair.target_name, pair.drafter_name, pair.drafter_kind) == ("target", "drafter", "model")
    assert (pair.device, pair.dtype, pair.notes) == ("cpu", "float32", ())
    assert pair.end_ids == {pair.tokenizer.eos_token_id}
    assert pair.drafter is not None
    for model in (pair.target, pair.drafter):
        assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_the_weights_are_those_of_the_folder(shelf: Path) -> None:
    ids = torch.tensor([[1, 2, 3]])
    pair = load(shelf / "target", shelf / "drafter")
    assert pair.drafter is not None
    assert torch.equal(pair.target(ids).logits, tiny_llama(vocab_size=300, num_hidden_layers=6)(ids).logits)
    assert torch.equal(pair.drafter(ids).logits, tiny_llama(1, vocab_size=300)(ids).logits)


def test_layers_of_the_target(shelf: Path) -> None:
    pair = load(shelf / "target", "layers:4")
    assert pair.drafter is not None and pair.drafter.config.num_hidden_layers == 4
    assert (pair.drafter_kind, pair.drafter_name, pair.notes) == ("layers:4", "target, first 4 layers", ())


def test_without_a_drafter_a_third_of_the_layers(shelf: Path) -> None:
    pair = load(shelf / "target")
    assert pair.drafter_kind == "layers:2" and pair.notes == ("no drafter was given: drafting with the first 2 layers of target",)


@pytest.mark.parametrize("name", ["single", "t5", "mamba"])
def test_without_a_drafter_where_the_model_cannot_be_cut(shelf: Path, name: str) -> None:
    pair = load(shelf / name)
    assert (pair.drafter, pair.drafter_name, pair.drafter_kind) == (None, None, None)
    assert "no drafter" in pair.notes[0] and name in pair.notes[0]


def test_an_encoder_decoder_pair(shelf: Path) -> None:
    pair = load(shelf / "t5", shelf / "t5")
    assert type(pair.target).__name__ == "T5ForConditionalGeneration" and pair.drafter_kind == "model"


@pytest.mark.parametrize("name", ["bare", "padded"])
def test_drafters_that_share_the_tokenizer(shelf: Path, name: str) -> None:
    assert load(shelf / "target", shelf / name).drafter_kind == "model"
    assert load(shelf / "padded", shelf / name).drafter_kind == "model"


@pytest.mark.parametrize(
    ("drafter", "words"),
    [("stranger", "tokenizer is another one"), ("narrow", "vocabulary is smaller"), ("t5", "encoder-decoder")],
)
def test_drafters_that_do_not_fit(shelf: Path, drafter: str, words: str) -> None:
    assert words in refusal(shelf / "target", shelf / drafter)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"drafter": "layers:0"}, "1..5"),
        ({"drafter": "layers:6"}, "1..5"),
        ({"drafter": "layers:"}, "layers:K"),
        ({"drafter": "layers:-1"}, "layers:K"),
        ({"drafter": "layers:two"}, "layers:K"),
        ({"device": "gpu"}, "auto, cpu, cuda, cuda:N or mps"),
        ({"dtype": "int3"}, "auto, float32, bfloat16, float16"),
        ({"quantize": "int4"}, "none, int8, nf4"),
        ({"drafter": "layers:2", "drafter_quantize": "int8"}, "shares the weights"),
        ({"drafter_quantize": "int8"}, "shares the weights"),
    ],
)
def test_bad_words_name_what_is_allowed(shelf: Path, words: dict[str, str], sentence: str) -> None:
    assert sentence in refusal(shelf / "target", **words)


def test_a_missing_cuda_device_names_those_that_exist(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "cuda:0 to cuda:1" in refusal(shelf / "target", device="cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "no usable CUDA device" in refusal(shelf / "target", device="cuda")


def test_layers_is_no_target() -> None:
    assert "can only be a --drafter" in refusal("layers:3")


def test_float32_is_the_default_of_the_cpu(shelf: Path) -> None:
    assert load(shelf / "half").dtype == "float32"
    assert load(shelf / "half", dtype="bfloat16").dtype == "bfloat16"
    assert load(shelf / "target", shelf / "half", dtype="float16").dtype == "float16"


# What can be wrong with a folder: how it is damaged, and words of the sentence.


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def lose_the_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def want_remote_code(folder: Path) -> None:
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own"})
    (folder / "code.py").write_text("raise SystemExit('remote code was run')")


def become_a_vision_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(ViTConfig().to_dict()))


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (truncate, "truncated or corrupt"),
    (pickle, "pickled"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    (lose_a_weight, "lacks 1 of its weights"),
    (lambda folder: edit_config(folder, hidden_size=64), "shapes differ"),
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / "config.json").write_text("{oops"), "JSON"),
    (lambda folder: edit_config(folder, model_type="unheard-of"), "does not know"),
    (want_remote_code, "never run"),
    (become_a_vision_model, "not a text generation model"),
    (lose_the_tokenizer, "no tokenizer files"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "JSON"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[words for _, words in DAMAGES])
def test_damaged_folders(shelf: Path, tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(shelf / "drafter", folder)
    load(folder)
    damage(folder)
    sentence = refusal(folder)
    assert words in sentence and "copy" in sentence


def test_code_that_is_not_needed_is_not_run(shelf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(shelf / "target", folder)
    edit_config(folder, auto_map={"AutoModelForCausalLM": "code.Own"})
    (folder / "code.py").write_text("raise SystemExit('remote code was run')")
    pair = load(folder, "layers:1")
    assert type(pair.target).__module__.startswith("transformers.") and "not run" in pair.notes[0]


def test_a_folder_with_only_a_gguf_names_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "model.gguf") in refusal(tmp_path)


def test_a_gguf_file(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(vocab_size=300, num_hidden_layers=3), tiny_tokenizer()
    pair = load(write_gguf(tmp_path / "tiny.gguf", model, tokenizer), "layers:2")
    ids = torch.tensor([[1, 2, 3]])
    similarity = torch.cosine_similarity(pair.target(ids).logits, model(ids).logits, dim=-1)
    assert similarity.min() > 0.99 and type(pair.target.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert (pair.target_name, pair.drafter_kind, pair.dtype) == ("tiny.gguf", "layers:2", "float32")
    assert pair.end_ids == {tokenizer.eos_token_id} and pair.tokenizer.chat_template == tokenizer.chat_template


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    assert "no .gguf file" in refusal(tmp_path / "model.bin")
    assert "could not be loaded" in refusal(tmp_path / "bad.gguf")


@pytest.mark.parametrize("word", ["./missing", "/missing/folder", "~/missing", "missing.gguf", "a/b/c", "", " "])
def test_paths_that_do_not_exist(word: str) -> None:
    assert "does not exist" in refusal(word)


def test_words_that_are_no_hub_id() -> None:
    assert "neither a folder" in refusal("not a model")


def test_an_unknown_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "hub cannot be reached" in refusal("nobody/no-such-model")


def test_a_drafter_that_is_missing_is_noticed_before_the_target_is_loaded(shelf: Path) -> None:
    lines: list[str] = []
    with pytest.raises(UserError, match="does not exist"):
        load_pair(PairRequest(str(shelf / "target"), "./missing", device="cpu"), lines.append)
    assert lines == []


class GatedRepoError(OSError):
    """Recognised by its name, as the hub's own."""


class RepositoryNotFoundError(OSError):
    """Likewise."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("403"), "hf auth login"),
        (RepositoryNotFoundError("404"), "public model id"),
        (torch.OutOfMemoryError("CUDA out of memory"), "does not fit into memory"),
        (MemoryError(), "does not fit into memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "does not fit into memory"),
        (RuntimeError("something else\nwith details"), "could not be loaded: something else."),
        (RuntimeError(), "could not be loaded: RuntimeError."),
    ],
)
def test_other_failures_are_one_sentence(shelf: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        if isinstance(error, OSError):
            raise ValueError("what the library says around it") from error
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert words in refusal(shelf / "target")


def test_a_user_error_passes_as_it_is() -> None:
    with pytest.raises(UserError, match=r"^mine$"), explained("model"):
        raise UserError("mine")


def test_loading_is_silent_and_restores_what_it_silenced(shelf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.disable(logging.NOTSET)
    bars = transformers_logging.is_progress_bar_enabled()
    load(shelf / "target", shelf / "drafter")
    with pytest.raises(RuntimeError), quiet():
        warnings.warn("unseen", stacklevel=1)
        logging.getLogger("transformers").warning("unseen")
        sys.stderr.write("a bar that obeys no switch")
        raise RuntimeError
    assert capfd.readouterr() == ("", "")
    assert (logging.root.manager.disable, transformers_logging.is_progress_bar_enabled()) == (logging.NOTSET, bars)


def test_the_table_of_pairs() -> None:
    assert set(PAIRS) == {"embedded", "llama-3.2", "smollm2", "qwen3"}
    assert (PAIRS["embedded"].target, PAIRS["embedded"].drafter) == ("embedded", "layers:10")
