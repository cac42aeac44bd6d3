"""Loading a pair: sources, defaults and invalid requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shelf import load, refusal
from tiny import build, save_folder, tiny_llama, tiny_tokenizer
from transformers import BertConfig, BertLMHeadModel

from utils.errors import UserError
from utils.pairs.load_pair import load_pair
from utils.pairs.pair import loaded_message
from utils.pairs.request import PAIRS, PUBLISHED, PairRequest
from utils.text import Count, byte_size


def test_a_pair_of_folders(shelf: Path) -> None:
    reports: list[str] = []
    pair = load_pair(PairRequest(str(shelf / "target"), str(shelf / "drafter"), device="cpu"), reports.append)
    lines = [line for line in reports if not isinstance(line, Count)]
    for line, name in zip(lines, ("target", "drafter"), strict=True):
        assert {name, "(cpu,", "float32,"} <= set(line.split())
    loaded = loaded_message(pair)
    assert byte_size(pair.memory) in loaded and byte_size(pair.drafter_memory) in loaded
    assert (pair.target_name, pair.drafter_name, pair.drafter_kind) == ("target", "drafter", "model")
    assert (pair.device, pair.dtype, pair.notes[0]) == ("cpu", "float32", "pair: fine")
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


def test_without_a_drafter_a_third_of_the_layers_draft(shelf: Path) -> None:
    pair = load(shelf / "target")
    assert pair.drafter_kind == "layers:2" and pair.notes == (
        "no drafter was given: drafting with the first 2 layers of target",
    )


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
    [("narrow", "vocabulary is smaller"), ("t5", "encoder-decoder")],
)
def test_drafters_that_do_not_fit(shelf: Path, drafter: str, words: str) -> None:
    assert words in refusal(shelf / "target", shelf / drafter)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"drafter": "layers:0"}, "layers:K"),
        ({"drafter": "layers:6"}, "1..5"),
        ({"drafter": "layers:"}, "layers:K"),
        ({"drafter": "layers:-1"}, "layers:K"),
        ({"drafter": "layers:two"}, "layers:K"),
        ({"device": "gpu"}, "auto, cpu, cuda, cuda:N or mps"),
        ({"drafter": "layers:2", "drafter_quantize": "int8"}, "shares the weights"),
        ({"drafter_quantize": "int8"}, "shares the weights"),
    ],
)
def test_invalid_options_are_refused_with_the_allowed_values(shelf: Path, words: dict[str, str], sentence: str) -> None:
    assert sentence in refusal(shelf / "target", **words)


def test_a_missing_cuda_device_names_those_that_exist(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "cuda:0 to cuda:1" in refusal(shelf / "target", device="cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "no usable CUDA device" in refusal(shelf / "target", device="cuda")


def test_layers_cannot_be_a_target() -> None:
    assert "can only be a --drafter" in refusal("layers:3")


def test_float32_is_the_default_of_the_cpu(shelf: Path) -> None:
    assert load(shelf / "half").dtype == "float32"
    assert load(shelf / "half", dtype="bfloat16").dtype == "bfloat16"
    assert load(shelf / "target", shelf / "half", dtype="float16").dtype == "float16"


def test_a_drafter_that_is_missing_is_noticed_before_the_target_is_loaded(shelf: Path) -> None:
    lines: list[str] = []
    with pytest.raises(UserError, match="does not exist"):
        load_pair(PairRequest(str(shelf / "target"), "./missing", device="cpu"), lines.append)
    assert lines == []


def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    fields = {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model = build(BertLMHeadModel, BertConfig(**fields, initializer_range=0.4), 0)
    assert "'bert' attends to later tokens" in refusal(save_folder(tmp_path / "bert", model, tiny_tokenizer()))


def test_the_table_of_pairs() -> None:
    assert PAIRS.keys() - PUBLISHED.keys() == {"embedded", "llama-3.2", "smollm2", "qwen3"}
    published = [PAIRS[name] for name in PUBLISHED]
    assert len({pair.drafter for pair in published}) == len(published) >= 10
    assert all(pair.target and "/" in pair.target and "/" in str(pair.drafter) for pair in published)
    assert (PAIRS["embedded"].target, PAIRS["embedded"].drafter) == ("embedded", "head")
