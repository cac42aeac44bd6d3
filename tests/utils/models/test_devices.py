"""A target and a drafter on two devices, as far as this can be tested on a machine with one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shelf import load, refusal
from tiny import tiny_head
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
from sampling import autoregressive_generate, speculative_generate
from sampling.verification import residual_of
from utils.decode.layer_cut import first_layers
from utils.decode.model_info import is_spread
from utils.drafter_formats.eagle3_file import Surroundings, save_eagle3
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.models import memory
from utils.models.checkpoints import load_model
from utils.models.memory import Placement, needed_bytes, plan_memory, weight_counts
from utils.models.sources import Source
from utils.pairs import load_pair


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that models are loaded to. Two CUDA devices seem to exist; models for them stay on the CPU."""
    requested: list[str] = []

    def load_on_cpu(source: Source, kind: str, where: Placement, **options: object) -> PreTrainedModel:
        requested.append(where.device)
        return load_model(source, kind, Placement("cpu", torch.float32, where.report))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(load_pair, "load_model", load_on_cpu)
    return requested


def test_both_models_are_loaded_to_the_device(shelf: Path, devices: list[str]) -> None:
    pair = load(shelf / "target", shelf / "drafter", device="cuda:1")
    assert devices == ["cuda:1"] * 2 and pair.device == "cuda:1"


def write_head(folder: Path, target: PreTrainedModel) -> Path:
    drafter = tiny_head(target)
    head, embedding = drafter.lm_head, drafter.embed_tokens.weight
    del drafter.lm_head, drafter.embed_tokens
    around = Surroundings(embedding, head.rows.weight, head.vocabulary)
    save_eagle3(folder, drafter, target, around)
    return folder


def test_a_residual_is_computed_on_the_device_of_the_target() -> None:
    with FakeTensorMode():  # raises for any operation on two devices
        assert str(residual_of(torch.empty(5, device="cuda"), torch.empty(5)).device) == "cuda:0"


IN_MEMORY = ("embed_tokens", *(f"layers.{number}" for number in range(4)), "norm", "rotary_emb")
DEVICE_MAP = {f"model.{part}": "cpu" for part in IN_MEMORY} | {"model.layers.4": "disk", "model.layers.5": "disk"}


def spread_model(folder: Path, offload: Path) -> PreTrainedModel:
    """A model whose last layers are read from the disk when they are used, as accelerate does between devices."""
    device_map = DEVICE_MAP | {"lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=offload, dtype=torch.float32
    )
    return model.eval().requires_grad_(False)


def sampled_texts(target: PreTrainedModel, drafter: PreTrainedModel) -> dict[str, list[int]]:
    """Token ids by strategy, from the same seed."""
    options: dict[str, Any] = {
        "logits_processor": MultinomialProcessor(0.9),
        "max_gen_len": 8,
        "eos_tokens_id": None,
        "seed": 42,
    }
    prompt, coupled = [5, 9, 13, 9, 5, 9], {"gamma": 3, "verify": "coupled"}
    storage = NGramStorage(3, 300)
    return {
        "speculative": speculative_generate(prompt, drafter, target, **options, **coupled)[0],
        "ngram": ngram_assisted_speculative_generate(prompt, storage, target, **options, **coupled)[0],
        "target": autoregressive_generate(prompt, target, **options),
        "drafter": autoregressive_generate(prompt, drafter, **options),
    }


def test_a_spread_target_writes_the_same_text(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, spread = load(shelf / "target", shelf / "drafter"), spread_model(shelf / "target", tmp_path / "offload")
    head = write_head(tmp_path / "head", whole.target)
    assert is_spread(spread) and not is_spread(whole.target) and spread.model.layers[4].mlp.up_proj.weight.is_meta
    monkeypatch.setattr(load_pair, "load_model", lambda *arguments, **options: spread)
    pair = load(shelf / "target", shelf / "drafter")
    assert pair.target is spread and pair.memory > 0
    assert (whole.device, pair.device) == ("cpu", "cpu + disk")
    texts = [sampled_texts(each.target, whole.drafter) for each in (whole, pair)]
    assert texts[0] == texts[1] and texts[0]["target"] != texts[0]["drafter"]
    state = pair.engine.use("auto", 1)
    assert state.kind == "plain" and "several devices" in state.reason
    with pytest.raises(UserError, match="several devices"):
        first_layers(spread, 2)
    assert "--drafter" in refusal(shelf / "target", head)


@pytest.mark.parametrize(
    ("free", "may_spread", "spread"),
    [
        ({"cuda:0": 400_000, "cuda:1": 0, "cpu": 0}, True, False),
        ({"cuda:0": 200_000, "cuda:1": 200_000, "cpu": 0}, True, True),
        ({"cuda:0": 100_000, "cuda:1": 100_000, "cpu": 200_000}, True, True),
        ({"cuda:0": 100_000, "cuda:1": 100_000, "cpu": 50_000}, True, None),
        ({"cuda:0": 200_000, "cuda:1": 200_000, "cpu": 900_000}, False, None),
    ],
)
def test_auto_spreads_a_model_that_is_too_large_for_one_gpu(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, int], may_spread: bool, spread: bool | None
) -> None:
    source = Source(str(shelf / "target"), "target")
    where = Placement("cuda:0", torch.float32, print, may_spread=may_spread)
    assert 250_000 < needed_bytes(weight_counts(source), torch.float32, "none") < 400_000
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(memory, "free_bytes", free.__getitem__)
    if spread is None:
        with pytest.raises(UserError, match="memory"):
            plan_memory(source, "none", where)
    else:
        assert plan_memory(source, "none", where)[1] is spread
