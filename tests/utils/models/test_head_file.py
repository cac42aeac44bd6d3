"""Heads as folders: what is read back, for which target, and one sentence if it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shelf import fill_shelf, load, refusal
from tiny import save_folder, tiny_head, tiny_llama, tiny_tokenizer

from utils.errors import UserError
from utils.models.draft_head import REMEDY, HeadFile, feature_layers, load_head, read_head, save_head


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets, and a head of the one called `target`."""
    root = fill_shelf(tmp_path_factory.mktemp("shelf"))
    target = load(root / "target").target
    model = tiny_head(target)
    save_head(root / "head", HeadFile.of(model.head, model.vocabulary, target))
    return root


def test_a_head_is_read_as_it_was_written(shelf: Path) -> None:
    target = tiny_llama(vocab_size=300, num_hidden_layers=6)
    written, read = tiny_head(target), load_head(shelf / "head", target)
    assert read.head.shape == written.head.shape and torch.equal(read.vocabulary, written.vocabulary)
    for name, part in written.head.state_dict().items():
        assert torch.equal(read.head.state_dict()[name], part.bfloat16().float()), name
    assert read.rows.weight.shape == (150, 32)


def test_a_pair_with_a_head(shelf: Path) -> None:
    pair = load(shelf / "target", shelf / "head")
    assert (pair.drafter_kind, pair.drafter_name, pair.drafter_quantize) == ("head", "head of target", None)
    assert pair.drafter.embed is pair.target.get_input_embeddings()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_head_fits_its_target_in_any_number_format(shelf: Path, dtype: str) -> None:
    head = load(shelf / "target", shelf / "head", dtype=dtype).drafter
    assert head.dtype == head.rows.weight.dtype == getattr(torch, dtype)


def test_a_head_is_refused_for_a_different_target(shelf: Path) -> None:
    save_folder(shelf / "sibling", tiny_llama(7, vocab_size=300, num_hidden_layers=6), tiny_tokenizer())
    deeper = tiny_llama(vocab_size=300, num_hidden_layers=7)
    deeper.load_state_dict(tiny_llama(vocab_size=300, num_hidden_layers=6).state_dict(), strict=False)
    save_folder(shelf / "deeper", deeper, tiny_tokenizer())
    for other in ("sibling", "padded", "single", "deeper"):
        assert REMEDY in refusal(shelf / other, shelf / "head")


@pytest.mark.parametrize("size", [0, 1000])
def test_truncated_files_are_refused(shelf: Path, tmp_path: Path, size: int) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(shelf / "head", folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:size])
    assert REMEDY in refusal(shelf / "target", folder)
    (folder / "head.json").write_text("{")
    assert REMEDY in refusal(shelf / "target", folder)
    (folder / "model.safetensors").unlink()
    assert str(folder) in refusal(shelf / "target", folder)


def test_options_that_do_not_apply_to_a_head(shelf: Path) -> None:
    assert "--drafter-quantize" in refusal(shelf / "target", shelf / "head", drafter_quantize="int8")
    assert "'head'" in refusal(shelf / "target", "head")


@pytest.mark.parametrize(("count", "layers"), [(1, (1, -1)), (2, (1, -1)), (4, (1, 3, -1)), (30, (7, 22, -1))])
def test_a_head_reads_early_late_and_last_layers(count: int, layers: tuple[int, ...]) -> None:
    assert feature_layers(count) == layers


NAN = float("nan")
SHAPES: list[dict[str, Any]] = [
    *({"heads": value} for value in (0, 3, 64, 32, "x")),
    *({"groups": value} for value in (0, 3)),
    {"positions": "x"},
    *({"width": value} for value in (0, 10**9)),
    *({"layers": value} for value in ([1, 2, 99], "abc", [], [[1]], 3)),
    *({"theta": value} for value in (NAN, 0, None)),
    {"hidden": 64},
    {"depth": 3},
]


def refused(folder: Path) -> bool:
    """Whether a folder is refused as a head of the target, with the remedy or at least its name."""
    with pytest.raises(UserError) as raised:
        read_head(folder, tiny_llama(vocab_size=300, num_hidden_layers=6))
    return REMEDY in str(raised.value) or str(folder) in str(raised.value)


def test_damaged_shapes_are_refused(shelf: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shelf / "head", tmp_path / "changed")
    about = json.loads((folder / "head.json").read_text())
    for other in ({"format": "other"}, {"version": 99}, {"shape": {}}, {"shape": None}):
        (folder / "head.json").write_text(json.dumps(about | other))
        assert refused(folder), other
    for change in SHAPES:
        (folder / "head.json").write_text(json.dumps(about | {"shape": about["shape"] | change}))
        assert refused(folder), change
    (folder / "head.json").write_text("[" * 100_000)
    assert refused(folder)


VOCABULARIES = {
    "too high": torch.tensor([1, 2, 999]),
    "negative": torch.tensor([-5, 1]),
    "not ascending": torch.tensor([2, 1]),
    "twice": torch.tensor([1, 1]),
    "empty": torch.tensor([], dtype=torch.int64),
    "floats": torch.tensor([1.0, 2.0]),
    "flags": torch.tensor([False, True]),
    "scalar": torch.tensor(1),
    "matrix": torch.tensor([[1, 2]]),
}


def test_damaged_tensors_are_refused(shelf: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shelf / "head", tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    damaged = {name: tensors[name].clone() for name in ("mark", "mix.weight", "norm.weight")}
    for part, value in zip(damaged.values(), (NAN, float("inf"), NAN), strict=True):
        part.view(-1)[0] = value
    for name, tensor in [*damaged.items(), *(("vocabulary", tensor) for tensor in VOCABULARIES.values())]:
        save_file(tensors | {name: tensor}, folder / "model.safetensors")
        assert refused(folder), (name, tensor)
