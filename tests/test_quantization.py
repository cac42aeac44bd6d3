"""Both quantizations on tiny models, with a drafter cut out of the target, on either side of a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_folder, tiny_llama, tiny_t5, tiny_tokenizer
from tiny_gguf import write_gguf

from utils.errors import UserError
from utils.models.layer_cut import first_layers
from utils.models.loading import Pair, PairRequest, load_pair
from utils.models.quantization import check_kind

IDS = torch.tensor([[5, 9, 33, 12, 7, 41]])
QUANTIZED = {"int8": "QLinear", "nf4": "Linear4bit"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Wide enough for blocks of 64 weights, the unit of nf4.
    model = tiny_llama(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    return save_folder(tmp_path_factory.mktemp("model") / "wide", model, tiny_tokenizer())


def load(folder: Path, drafter: str, **words: str) -> Pair:
    return load_pair(PairRequest(str(folder), drafter, device="cpu", **words), lambda line: None)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize(("kind", "near"), [("int8", 0.99), ("nf4", 0.6)])
def test_a_quantized_target_is_near_the_full_one(folder: Path, kind: str, near: float) -> None:
    full, small = load(folder, "layers:1").target, load(folder, "layers:1", quantize=kind).target
    assert type(small.model.layers[0].mlp.up_proj).__name__ == QUANTIZED[kind]
    assert type(small.lm_head) is torch.nn.Linear
    weight = small.model.layers[0].mlp.up_proj.weight
    assert getattr(weight, "_data", weight).element_size() == 1
    similarity = torch.cosine_similarity(logits(full), logits(small), dim=-1).min()
    assert near < similarity < 1 - 1e-6


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("run_target_first", [True, False])
def test_a_cut_of_a_quantized_target(folder: Path, kind: str, run_target_first: bool) -> None:
    """The first forward may repack shared weights: neither order may disturb the other model."""
    target = load(folder, "layers:1", quantize=kind).target
    before = logits(target) if run_target_first else None
    cut = first_layers(target, 2)
    drafted = logits(cut)
    owned = {tensor.data_ptr() for tensor in [*target.parameters(), *target.buffers()]}
    assert all(tensor.data_ptr() in owned for tensor in [*cut.parameters(), *cut.buffers()])
    after = logits(target)
    assert torch.equal(logits(cut), drafted) and not torch.equal(drafted, after)
    assert before is None or torch.equal(before, after)
    alone = load(folder, "layers:1", quantize=kind).target
    assert torch.equal(logits(alone), after)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_drafter_beside_a_full_target(folder: Path, kind: str) -> None:
    pair = load(folder, str(folder), drafter_quantize=kind)
    assert pair.drafter is not None
    assert type(pair.drafter.model.layers[0].mlp.up_proj).__name__ == QUANTIZED[kind]
    assert type(pair.target.model.layers[0].mlp.up_proj) is torch.nn.Linear


@pytest.mark.parametrize("kind", QUANTIZED)
def test_generation_with_the_pair(folder: Path, kind: str) -> None:
    pair = load(folder, "layers:2", quantize=kind)
    pair.target.generation_config.pad_token_id = 0
    with torch.no_grad():
        out = pair.target.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)
    assert out.shape == (1, 12)


def test_int8_of_an_encoder_decoder(tmp_path: Path) -> None:
    save_folder(tmp_path / "t5", tiny_t5(vocab_size=300), tiny_tokenizer())
    target = load(tmp_path / "t5", str(tmp_path / "t5"), quantize="int8").target
    with torch.no_grad():
        assert target(input_ids=IDS, decoder_input_ids=IDS).logits.isfinite().all()


def test_int8_of_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=300), tiny_tokenizer())
    target = load(path, "layers:1", quantize="int8").target
    assert type(target.model.layers[0].mlp.up_proj).__name__ == "QLinear" and logits(target).isfinite().all()


def test_nf4_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="nf4 cannot be made from the GGUF file"):
        load(tmp_path / "model.gguf", "layers:1", quantize="nf4")


@pytest.mark.parametrize("kind", ["int4", "", "INT8"])
def test_unknown_kinds_name_the_known_ones(kind: str) -> None:
    with pytest.raises(UserError, match="none, int8, nf4"):
        check_kind(kind, gguf=False, name="model")
