"""Checkpoints that are whole and yet odd: of another trade, of another vocabulary, quantized before, or that run as nobody can use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import screen, workbench
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_t5, tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
)

from utils.config.config_file import read_config
from utils.errors import UserError
from utils.models.sources import path_of
from utils.pairs.load_pair import PairRequest, load_pair
from utils.repl.runner import Verdict


def edit(folder: Path, file: str, **fields: Any) -> None:
    path = folder / file
    told = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(told | fields))


@pytest.fixture
def folder(shelf: Path, tmp_path: Path) -> Path:
    """A copy of a sound target, to be spoilt."""
    shutil.copytree(shelf / "target", tmp_path / "odd")
    return tmp_path / "odd"


@pytest.mark.parametrize(
    "fields",
    [
        {"suppress_tokens": [5000, -5000]},
        {"begin_suppress_tokens": [10**9]},
        {"bad_words_ids": [[9999]]},
        {"suppress_tokens": "all"},
        {"eos_token_id": [2, 10**6]},
    ],
)
def test_ids_of_another_vocabulary_forbid_nothing(folder: Path, fields: dict[str, Any]) -> None:
    edit(folder, "generation_config.json", **fields)
    pair = load(folder, "layers:1")
    bench = workbench(screen(), pair)
    assert bench.handle("/length 4") is bench.handle("Hello") is Verdict.DONE


@pytest.mark.parametrize("end", ["a", 1.5, {"a": 1}, [[1]]])
def test_end_tokens_that_are_none_are_the_targets_fault(shelf: Path, folder: Path, end: Any) -> None:
    edit(folder, "generation_config.json", eos_token_id=end)
    assert refusal(folder, shelf / "drafter").startswith("'odd'")


def test_models_that_do_not_run_as_decoders_need_it(tmp_path: Path, folder: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    layers = {
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2,
    }
    save_folder(
        tmp_path / "prophet", ProphetNetForConditionalGeneration(ProphetNetConfig(**sizes, **layers)), tiny_tokenizer()
    )
    assert "'prophet' was read but does not run" in refusal(tmp_path / "prophet")
    save_folder(tmp_path / "t5", tiny_t5(vocab_size=300), tiny_tokenizer())
    for file in ("config.json", "generation_config.json"):
        edit(tmp_path / "t5", file, decoder_start_token_id=9999)
    assert "does not run as decoders need it (index out of range" in refusal(tmp_path / "t5")
    edit(folder, "config.json", max_position_embeddings=1)
    assert "context of 1 token" in refusal(folder)


def test_a_classifier_is_no_writer_and_leftover_weights_are_told(shelf: Path, tmp_path: Path, folder: Path) -> None:
    config = tiny_llama(vocab_size=300).config
    save_folder(tmp_path / "classifier", LlamaForSequenceClassification(config), tiny_tokenizer())
    assert "no head that says tokens (lm_head.weight is missing)" in refusal(tmp_path / "classifier")
    edit(folder, "config.json", num_hidden_layers=4)
    lines: list[str] = []
    load_pair(PairRequest(str(folder), "layers:1", device="cpu"), lines.append)
    assert any("18 of the weights in its files are not used (model.layers.4." in line for line in lines)


def test_a_tokenizer_with_more_tokens_than_rows_is_told_and_one_that_fails_refused(
    shelf: Path, tmp_path: Path, folder: Path
) -> None:
    save_folder(tmp_path / "few", tiny_llama(vocab_size=260), tiny_tokenizer())
    assert any("40 tokens that the model does not know" in note for note in load(tmp_path / "few", "layers:1").notes)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))  # which is not among them
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    assert "'odd' could not be loaded (WordLevel error" in refusal(shelf / "target", folder)


@pytest.mark.parametrize("kind", ["bnb-int8", "nf4"])
def test_what_was_quantized_before_is_called_so(
    shelf: Path, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    save_folder(tmp_path / "full", tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=128), tiny_tokenizer())
    words: dict[str, Any] = (
        {"load_in_8bit": True} if kind == "bnb-int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "full", quantization_config=BitsAndBytesConfig(**words), device_map={"": "cpu"}
    )
    save_folder(tmp_path / "before", model, tiny_tokenizer())
    capfd.readouterr()
    pair = load(tmp_path / "before", "layers:1")
    assert pair.quantize == kind
    assert workbench(screen(), pair).handle("Hello") is Verdict.DONE and "MatMul8bitLt" not in "".join(
        capfd.readouterr()
    )
    for other in ("int8", "nf4", "bnb-int8"):
        assert f"is quantized already ({kind}): leave {other} out" in refusal(tmp_path / "before", quantize=other)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder: edit(folder, "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
            "take the unquantized model",
        ),
        (lambda folder: edit(folder, "config.json", num_hidden_layers="two"), "expected int, got str"),
        (lambda folder: edit(folder, "config.json", hidden_act="nonsense"), "look at its config.json"),
        (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "holds an adapter"),
        (
            lambda folder: (folder / "model.safetensors").unlink() or os.mkfifo(folder / "model.safetensors"),
            "is no file",
        ),
        (
            lambda folder: (
                (folder / "model.safetensors").rename(folder / "model-1.safetensors")
                and (folder / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"lm_head.weight": "model-2.safetensors"}}'
                )
            ),
            "fetch or copy it again",
        ),
    ],
)
def test_one_sentence_with_the_reason_and_a_remedy(folder: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoil(folder)
    assert words in refusal(folder)


def test_words_that_can_be_no_path(shelf: Path) -> None:
    for word in ("~nosuchuser/x", "/tmp/" + "x" * 5000):
        assert "cannot be a path" in refusal(word) and "cannot be a path" in refusal(shelf / "target", word)
    assert path_of(f"{shelf / 'target' / 'config.json'}/Qwen3") and path_of("Qwen/Qwen3"), (
        "no path, but a word may be an id"
    )
    with pytest.raises(UserError, match="cannot be a path"):
        path_of("a\0b")


def test_a_truncated_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert "is no whole GGUF file" in refusal(tmp_path / "empty.gguf")


def test_a_config_file_without_bottom(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("x = " + "[" * 5000)
    with pytest.raises(UserError, match="is no valid TOML"):
        read_config(tmp_path / "deep.toml")
