"""Every quantization of tiny models: targets, drafters, cut layers and GGUF files, and what is refused."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from shelf import load, refusal, write_wide_gguf
from tiny import save_folder, tiny_llama, tiny_t5, tiny_tokenizer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from utils.bounds import QUANTIZATIONS
from utils.decode.layer_cut import first_layers
from utils.engine.stored_weights import data
from utils.errors import UserError
from utils.models import quantization
from utils.models.load_errors import CAUSES
from utils.models.quantization import check_quantization

IDS = torch.tensor([[5, 9, 33, 12, 7, 41]])
QUANTIZED = {"int8": "QLinear", "int4": "QLinear", "bnb-int8": "Linear8bitLt", "nf4": "Linear4bit"}
MIN_SIMILARITY = {"int8": 0.99, "int4": 0.4, "bnb-int8": 0.99, "nf4": 0.4}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


@cache
def target_of(folder: Path, kind: str) -> Any:
    """A target that tests do not change."""
    return load(folder, "layers:1", quantize=kind).target


def test_every_kind_is_tested() -> None:
    assert {"none", *QUANTIZED} == set(QUANTIZATIONS)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_target_is_similar_to_the_full_one(wide: Path, kind: str) -> None:
    full, small = target_of(wide, "none"), target_of(wide, kind)
    assert {type(part).__name__ for part in small.model.layers.modules() if "Linear" in type(part).__name__} == {
        QUANTIZED[kind]
    }
    assert type(small.lm_head) is nn.Linear and torch.equal(small.lm_head.weight, full.lm_head.weight)
    assert not any(part.training for part in small.modules())
    similarity = torch.cosine_similarity(logits(full), logits(small), dim=-1).min()
    assert MIN_SIMILARITY[kind] < similarity < 1 - 1e-6


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_weights_are_rounded_to_the_nearest_step(wide: Path, kind: str, bits: int) -> None:
    for layer in ("up_proj", "down_proj"):  # one scale per row, and several groups per row
        full, small = (
            data(getattr(target_of(wide, name).model.layers[0].mlp, layer).weight) for name in ("none", kind)
        )
        assert (small.dequantize() - full).abs().max() <= 1.01 * full.abs().max() / (2**bits - 2)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_tied_embeddings_stay_tied(tmp_path: Path, kind: str) -> None:
    tied = save_folder(
        tmp_path / "tied", tiny_llama(vocab_size=300, hidden_size=64, tie_word_embeddings=True), tiny_tokenizer()
    )
    small = load(tied, "layers:1", quantize=kind).target
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert torch.equal(small.lm_head.weight, load(tied, "layers:1").target.lm_head.weight)


@pytest.mark.parametrize(
    ("kind", "run_target_first"),
    [
        pytest.param(kind, first, marks=() if first == bool(index % 2) else pytest.mark.full)
        for index, kind in enumerate(QUANTIZED)
        for first in (True, False)
    ],
)
def test_a_cut_of_a_quantized_target(wide: Path, kind: str, run_target_first: bool) -> None:
    """The first forward pass may repack shared weights. Neither order may change the logits of the other model."""
    target = load(wide, "layers:1", quantize=kind).target
    before = logits(target) if run_target_first else None
    cut = first_layers(target, 2)
    drafted = logits(cut)
    owned = {tensor.data_ptr() for tensor in [*target.parameters(), *target.buffers()]}
    assert all(tensor.data_ptr() in owned for tensor in [*cut.parameters(), *cut.buffers()])
    after = logits(target)
    assert torch.equal(logits(cut), drafted) and not torch.equal(drafted, after)
    assert before is None or torch.equal(before, after)
    assert torch.equal(logits(target_of(wide, kind)), after)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_drafter_beside_a_full_target(wide: Path, kind: str) -> None:
    pair = load(wide, wide, drafter_quantize=kind)
    assert pair.drafter is not None and pair.drafter_memory is not None
    assert type(pair.drafter.model.layers[0].mlp.up_proj).__name__ == QUANTIZED[kind]
    assert type(pair.target.model.layers[0].mlp.up_proj) is nn.Linear
    assert (pair.quantize, pair.drafter_quantize) == ("none", kind) and pair.drafter_memory < pair.memory
    assert not any("/audit" in note for note in pair.notes)  # a drafter does not decide the text


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, name, marks=() if (kind in ("int8", "nf4")) and name == "bfloat16" else pytest.mark.full)
        for kind in QUANTIZED
        for name in ("bfloat16", "float32", "float16")
    ],
)
def test_generation_with_the_pair(wide: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "handle", lambda self, record: warnings.append(record))
    pair = load(wide, "layers:2", quantize=kind, dtype=dtype)
    state = pair.engine.use("auto", 1)
    assert state.kind == "plain" and "quantized" in state.reason
    pair.target.generation_config.pad_token_id = 0
    with torch.no_grad():
        out = pair.target.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)
    assert out.shape == (1, 12) and not [record for record in warnings if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full if kind == "int4" else ()) for kind in QUANTIZED]
)
def test_an_encoder_decoder(tmp_path: Path, kind: str) -> None:
    save_folder(tmp_path / "t5", tiny_t5(vocab_size=300), tiny_tokenizer())
    target = load(tmp_path / "t5", str(tmp_path / "t5"), quantize=kind).target
    assert (
        type(target.lm_head) is nn.Linear
        and type(target.decoder.block[0].layer[0].SelfAttention.q).__name__ == QUANTIZED[kind]
    )
    with torch.no_grad():
        assert target(input_ids=IDS, decoder_input_ids=IDS).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_gguf_file_is_quantized_by_quanto_only(tmp_path: Path, own_cache: Path, kind: str) -> None:
    path = write_wide_gguf(tmp_path / "tiny.gguf")
    if kind == "nf4":
        assert "GGUF" in refusal(path, "layers:1", quantize=kind)
        return
    target = load(path, "layers:1", quantize=kind).target
    assert type(target.model.layers[0].mlp.up_proj).__name__ == QUANTIZED[kind] and type(target.lm_head) is nn.Linear
    assert not any(part.training for part in target.modules())


def test_nothing_is_compiled(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optimum.quanto.library.extensions import extension

    def compile(**options: Any) -> None:
        raise AssertionError("a compiler was called")

    monkeypatch.setattr(extension, "load", compile)
    monkeypatch.setenv("PATH", "")
    for known in extension._extensions.values():
        monkeypatch.setattr(known, "_lib", None)
    assert logits(load(wide, "layers:1", quantize="int4").target).isfinite().all()


@pytest.mark.parametrize("kind", ["bnb-int8", "nf4"])
def test_bitsandbytes_is_refused_on_mps(kind: str) -> None:
    with pytest.raises(UserError, match=kind):
        check_quantization(kind, "mps")
    check_quantization("int8", "mps")


def test_int4_of_a_width_that_is_not_a_multiple_of_a_group(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=300, intermediate_size=200)
    odd = save_folder(tmp_path / "odd", model, tiny_tokenizer())
    sentence = refusal(odd, "layers:1", quantize="int4")
    assert "down_proj" in sentence and "200" in sentence and str(quantization.GROUP_SIZE) in sentence
    assert load(odd, "layers:1", quantize="int8").quantize == "int8"
    assert load(odd, "layers:1", quantize="nf4").quantize == "nf4"


def test_a_model_without_linear_layers(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    save_folder(tmp_path / "gpt2", GPT2LMHeadModel(config).eval(), tiny_tokenizer())
    assert "int8" in refusal(tmp_path / "gpt2", "layers:1", quantize="int8")


def test_a_failing_kernel_is_one_sentence_while_loading(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(packed: torch.Tensor, bits: int) -> torch.Tensor:
        raise NotImplementedError("no such kernel\nadvice")

    monkeypatch.setattr(quantization, "unpack", broken)
    sentence = refusal(wide, "layers:1", quantize="int4")
    assert "'wide'" in sentence and "(no such kernel)" in sentence and "--quantize" in sentence
    monkeypatch.setattr(quantization, "unpack", lambda packed, bits: (_ for _ in ()).throw(MemoryError()))
    assert [*CAUSES][-1] in refusal(wide, "layers:1", quantize="int4")
