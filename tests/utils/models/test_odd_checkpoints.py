"""Complete but unusual checkpoints: other tasks, foreign token ids, quantized before, or models that cannot decode."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import open_session, screen
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

from utils.config.arguments import read_config
from utils.errors import UserError
from utils.models.sources import parse_path
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PairRequest
from utils.repl.repl_session import Verdict


def edit(folder: Path, file: str, **fields: Any) -> None:
    path = folder / file
    present = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(present | fields))


@pytest.fixture
def folder(shelf: Path, tmp_path: Path) -> Path:
    """A copy of a valid target, to be changed."""
    shutil.copytree(shelf / "target", tmp_path / "odd")
    return tmp_path / "odd"


@pytest.mark.parametrize(
    "fields",
    [
        {"suppress_tokens": [5000, -5000], "begin_suppress_tokens": [10**9]},
        {"bad_words_ids": [[9999]], "eos_token_id": [2, 10**6]},
    ],
)
def test_ids_outside_the_vocabulary_forbid_nothing(folder: Path, fields: dict[str, Any]) -> None:
    edit(folder, "generation_config.json", **fields)
    pair = load(folder, "layers:1")
    session = open_session(screen(), pair)
    assert session.handle("/length 4") is session.handle("Hello") is Verdict.DONE


@pytest.mark.parametrize(
    ("field", "tokens"),
    [("suppress_tokens", "all"), ("begin_suppress_tokens", [1.5]), ("bad_words_ids", [True]), ("bad_words_ids", {})],
)
def test_rules_that_are_not_token_ids_are_refused(folder: Path, field: str, tokens: Any) -> None:
    edit(folder, "generation_config.json", **{field: [tokens] if field == "bad_words_ids" else tokens})
    assert field in refusal(folder, "layers:1")


@pytest.mark.parametrize("field", ["suppress_tokens", "begin_suppress_tokens"])
def test_rules_that_forbid_every_token_are_refused_with_the_remedy(folder: Path, field: str) -> None:
    edit(folder, "generation_config.json", **{field: list(range(299))})
    assert load(folder, "layers:1")
    edit(folder, "generation_config.json", **{field: list(range(300))})
    sentence = refusal(folder, "layers:1")
    assert field in sentence and "float32" not in sentence


@pytest.mark.parametrize("end", ["a", [[1]]])
def test_invalid_end_tokens_are_reported_for_the_target(shelf: Path, folder: Path, end: Any) -> None:
    edit(folder, "generation_config.json", eos_token_id=end)
    assert "'odd'" in refusal(folder, shelf / "drafter")


def test_models_that_do_not_run_as_decoders(tmp_path: Path, folder: Path) -> None:
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
    assert "'prophet'" in refusal(tmp_path / "prophet")
    save_folder(tmp_path / "t5", tiny_t5(vocab_size=300), tiny_tokenizer())
    for file in ("config.json", "generation_config.json"):
        edit(tmp_path / "t5", file, decoder_start_token_id=9999)
    assert "(index out of range" in refusal(tmp_path / "t5")


def test_a_missing_output_head_is_refused_and_unused_weights_are_reported(
    shelf: Path, tmp_path: Path, folder: Path
) -> None:
    config = tiny_llama(vocab_size=300).config
    save_folder(tmp_path / "classifier", LlamaForSequenceClassification(config), tiny_tokenizer())
    assert "lm_head.weight" in refusal(tmp_path / "classifier")
    edit(folder, "config.json", num_hidden_layers=4)
    lines: list[str] = []
    load_pair(PairRequest(str(folder), "layers:1", device="cpu"), lines.append)
    assert any("18 of" in line and "(model.layers.4." in line for line in lines)


def test_unknown_tokens_are_reported_and_a_failing_tokenizer_is_refused(
    shelf: Path, tmp_path: Path, folder: Path
) -> None:
    save_folder(tmp_path / "few", tiny_llama(vocab_size=260), tiny_tokenizer())
    assert any("40 tokens" in note for note in load(tmp_path / "few", "layers:1").notes)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))  # which is not among them
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    assert "(WordLevel error" in refusal(shelf / "target", folder)


@pytest.mark.parametrize("kind", ["bnb-int8", "nf4"])
def test_a_stored_quantization_is_recognised(
    shelf: Path, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    save_folder(tmp_path / "full", tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=128), tiny_tokenizer())
    options: dict[str, Any] = (
        {"load_in_8bit": True} if kind == "bnb-int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "full", quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"}
    )
    save_folder(tmp_path / "before", model, tiny_tokenizer())
    capfd.readouterr()
    pair = load(tmp_path / "before", "layers:1")
    assert pair.quantize == kind
    session = open_session(screen(), pair)
    assert session.handle("/length 4") is session.handle("Hello") is Verdict.DONE
    assert "MatMul8bitLt" not in "".join(capfd.readouterr())
    for other in ("int8", "nf4", "bnb-int8"):
        sentence = refusal(tmp_path / "before", quantize=other)
        assert f"({kind})" in sentence and other in sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda folder: edit(folder, "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
            "could not be loaded",
        ),
        (lambda folder: edit(folder, "config.json", num_hidden_layers="two"), "expected int, got str"),
        (lambda folder: edit(folder, "config.json", hidden_act="nonsense"), "nonsense"),
        (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "adapter"),
        (
            lambda folder: (folder / "model.safetensors").unlink() or os.mkfifo(folder / "model.safetensors"),
            "model.safetensors",
        ),
        (
            lambda folder: (
                (folder / "model.safetensors").rename(folder / "model-1.safetensors")
                and (folder / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"lm_head.weight": "model-2.safetensors"}}'
                )
            ),
            "'metadata'",
        ),
    ],
)
def test_one_sentence_with_the_reason(folder: Path, change: Callable[[Path], Any], words: str) -> None:
    change(folder)
    assert words in refusal(folder)


def test_words_that_cannot_be_a_path(shelf: Path) -> None:
    for word in ("~nosuchuser/x", "/tmp/" + "x" * 5000):
        assert f"'{word[:80]}'" in refusal(word) and f"'{word[:80]}'" in refusal(shelf / "target", word)
    assert parse_path(f"{shelf / 'target' / 'config.json'}/Qwen3") and parse_path("Qwen/Qwen3"), (
        "not an existing path, but it may be an id"
    )
    with pytest.raises(UserError, match="path"):
        parse_path("a\0b")


def test_a_truncated_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert "GGUF file" in refusal(tmp_path / "empty.gguf")


def test_a_config_file_that_nests_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("x = " + "[" * 5000)
    with pytest.raises(UserError, match="not valid TOML"):
        read_config(tmp_path / "deep.toml")
