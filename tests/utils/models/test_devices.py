"""A target and a drafter on two devices, as far as a machine with one of them can tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shelf import load, refusal
from tiny import tiny_head
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

import infer
from ngram_assisted import NGramStorage
from sampling.verification import _residual
from utils.comparison.strategies import Job
from utils.config.settings import Settings
from utils.decode.layer_cut import first_layers
from utils.decode.model_session import is_spread
from utils.engine import Engine
from utils.errors import UserError
from utils.logits_processor import MultinomialProcessor
from utils.metrics.results import tokens_of
from utils.models import checkpoints
from utils.models import memory as room
from utils.models.checkpoints import load_model
from utils.models.devices import Placement
from utils.models.head_file import HeadFile, save_head
from utils.models.load_checks import check_numbers
from utils.models.memory import find_room, needed_bytes, weight_counts
from utils.models.sources import Source
from utils.pairs import load_drafter as pair_drafter
from utils.pairs import load_pair as loading
from utils.pairs.weights import stored_bytes


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where models were to be put. This machine is told that it has two CUDA devices; what goes there stays on the CPU."""
    seen: list[str] = []

    def loaded(source, kind, where):
        seen.append(where.device)
        return load_model(source, kind, Placement("cpu", torch.float32, where.report))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for module in (loading, pair_drafter):
        monkeypatch.setattr(module, "load_model", loaded)
    return seen


def test_the_drafter_goes_where_it_is_told_to(shelf: Path, places: list[str]) -> None:
    pair = load(shelf / "target", shelf / "drafter", device="cuda:1", drafter_device="cpu")
    assert places == ["cuda:1", "cpu"] and (pair.device, pair.drafter_device) == ("cuda:1", "cpu")
    pair = load(shelf / "target", shelf / "drafter", device="cuda:1")
    assert places[2:] == ["cuda:1"] * 2 and pair.drafter_device == "cuda:1"


def test_what_shares_the_targets_weights_or_reads_its_states_stays_with_it(
    shelf: Path, places: list[str], tmp_path: Path
) -> None:
    target, head = load(shelf / "target").target, tmp_path / "head"
    kept = tiny_head(target)
    save_head(head, HeadFile.of(kept.head, kept.vocabulary, target))
    for drafter, words in (("layers:2", "shares the weights"), (None, "shares the weights"), (head, "hidden states")):
        said = refusal(shelf / "target", drafter, device="cuda:0", drafter_device="cpu")
        assert words in said and "leave --drafter-device out" in said
    assert load(shelf / "target", "layers:2", drafter_device="cpu").drafter_kind == "layers:2"
    assert "no mps device" in refusal(shelf / "target", shelf / "drafter", drafter_device="mps")


def test_a_residual_is_made_where_the_target_is() -> None:
    with FakeTensorMode():  # refuses any operation over two devices
        assert str(_residual(torch.empty(5, device="cuda"), torch.empty(5)).device) == "cuda:0"


LAYERED = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def layered_model(folder: Path, offload: Path) -> Any:
    """Layers behind the first are fetched from the disk whenever they are used, as accelerate does it between GPUs and the CPU."""
    places = LAYERED | {f"model.layers.{number}": "disk" for number in range(1, 6)}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=offload, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def test_a_target_on_several_devices_writes_the_same_text(shelf: Path, tmp_path: Path) -> None:
    whole, spread = load(shelf / "target", shelf / "drafter"), layered_model(shelf / "target", tmp_path)
    assert is_spread(spread) and not is_spread(whole.target) and spread.model.layers[3].mlp.up_proj.weight.is_meta
    pair = replace(whole, target=spread, engine=Engine([spread, whole.drafter]))
    texts = [run_all(candidate) for candidate in (whole, pair)]
    assert texts[0] == texts[1] and len(set(map(tuple, texts[0].values()))) > 1
    state = pair.engine.use("auto", 1)
    assert state.kind == "plain" and "several devices" in state.reason
    assert loading._place_of(spread, "cuda") == "cpu + disk" and loading._place_of(whole.target, "cpu") == "cpu"
    with pytest.raises(UserError, match="cannot be cut into layers: its layers are spread over several devices"):
        first_layers(spread, 2)
    with pytest.raises(UserError, match="on several devices"):
        pair_drafter.head_of(shelf / "head", spread, "spread")
    assert stored_bytes(spread) > 0 and check_numbers(spread, "spread") is None


def run_all(pair: Any) -> dict[str, list[int]]:
    """Tokens by strategy, drawn with the target's own noise."""
    settings = Settings(length=12, gamma=3, processor=MultinomialProcessor(0.9), verify="coupled", costs=None)
    job = Job([5, 9, 13, 9, 5, 9], replace(pair, end_ids=frozenset()), settings, NGramStorage(3, 300))
    kept = [row for row in infer.STRATEGIES if row.name in ("speculative", "ngram", "target", "drafter")]
    return {row.name: tokens_of(list(row.variants(("loaded",), pair)[0].steps(job))) for row in kept}


@pytest.mark.parametrize(
    ("free", "words", "outcome"),
    [
        ({"cuda:0": 400_000, "cuda:1": 0, "cpu": 0}, {"layered": True}, False),
        ({"cuda:0": 200_000, "cuda:1": 200_000, "cpu": 0}, {"layered": True}, True),
        ({"cuda:0": 100_000, "cuda:1": 100_000, "cpu": 200_000}, {"layered": True}, True),
        ({"cuda:0": 100_000, "cuda:1": 100_000, "cpu": 50_000}, {"layered": True}, None),
        ({"cuda:0": 200_000, "cuda:1": 200_000, "cpu": 900_000}, {}, None),
    ],
)
def test_auto_spreads_what_one_gpu_cannot_hold(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, int], words: dict[str, bool], outcome: bool | None
) -> None:
    source, where = Source(str(shelf / "target"), "target"), Placement("cuda:0", torch.float32, print, **words)
    assert 250_000 < needed_bytes(weight_counts(source), torch.float32, "none") < 400_000
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(room, "free_bytes", free.__getitem__)
    if outcome is None:
        with pytest.raises(UserError, match="of memory for its weights"):
            find_room(source, "none", where)
    else:
        assert find_room(source, "none", where).spread is outcome
        assert checkpoints._place_arguments(None, "target", where, find_room(source, "none", where)) == {
            "device_map": "auto" if outcome else {"": "cuda:0"}
        }
