"""A target and a drafter on two devices, as far as a machine with one of them can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shelf import load, refusal
from tiny import tiny_head
from torch._subclasses.fake_tensor import FakeTensorMode

from sampling.verification import _residual
from utils.models import loading, pair_drafter
from utils.models.checkpoints import Placement, load_model
from utils.models.head_file import HeadFile, save_head


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


def test_what_shares_the_targets_weights_or_reads_its_states_stays_with_it(shelf: Path, places: list[str], tmp_path: Path) -> None:
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
