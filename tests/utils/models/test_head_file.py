"""Heads as folders: what comes back, for which target, and the one sentence where it does not."""

import json

import pytest
import torch
from shelf import fill_shelf, load, refusal
from tiny import save_folder, tiny_head, tiny_llama, tiny_tokenizer

from utils.models.draft_head import feature_layers
from utils.models.head_file import HeadFile, load_head, save_head


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Targets, and a head of the one called `target`."""
    root = fill_shelf(tmp_path_factory.mktemp("shelf"))
    target = load(root / "target").target
    kept = tiny_head(target)
    save_head(root / "head", HeadFile.of(kept.head, kept.vocabulary, target))
    return root


def test_a_head_comes_back_as_it_was_kept(shelf):
    target = tiny_llama(vocab_size=300, num_hidden_layers=6)
    kept, found = tiny_head(target), load_head(shelf / "head", target)
    assert found.head.shape == kept.head.shape and torch.equal(found.vocabulary, kept.vocabulary)
    for name, part in kept.head.state_dict().items():
        assert torch.equal(found.head.state_dict()[name], part.bfloat16().float()), name
    assert found.rows.weight.shape == (150, 32)


def test_a_pair_with_a_head(shelf):
    pair = load(shelf / "target", shelf / "head")
    assert (pair.drafter_kind, pair.drafter_name, pair.drafter_quantize) == ("head", "head of target", None)
    assert pair.drafter.embed is pair.target.get_input_embeddings()


def test_a_head_fits_its_target_in_any_number_format(shelf):
    assert load(shelf / "target", shelf / "head", dtype="bfloat16").drafter.dtype == torch.bfloat16
    assert load(shelf / "target", shelf / "head", dtype="float16").drafter.rows.weight.dtype == torch.float16


def test_a_head_is_refused_for_another_target(shelf):
    save_folder(shelf / "sibling", tiny_llama(7, vocab_size=300, num_hidden_layers=6), tiny_tokenizer())
    deeper = tiny_llama(vocab_size=300, num_hidden_layers=7)
    deeper.load_state_dict(tiny_llama(vocab_size=300, num_hidden_layers=6).state_dict(), strict=False)
    save_folder(shelf / "deeper", deeper, tiny_tokenizer())
    for other in ("sibling", "padded", "single", "deeper"):
        assert "reads the hidden states of target" in refusal(shelf / other, shelf / "head")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "another format or version"),
        ({"version": 99}, "another format or version"),
        ({"shape": {}}, "no head that can be read"),
        ({"shape": None}, "no head that can be read"),
    ],
)
def test_a_head_with_another_description(shelf, tmp_path, change, words):
    copy(shelf / "head", tmp_path)
    about = json.loads((tmp_path / "head.json").read_text())
    (tmp_path / "head.json").write_text(json.dumps(about | change))
    assert words in refusal(shelf / "target", tmp_path)


@pytest.mark.parametrize("size", [0, 7, 1000, -1])
def test_a_head_whose_weights_are_cut_short(shelf, tmp_path, size):
    copy(shelf / "head", tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:size])
    assert "no head that can be read" in refusal(shelf / "target", tmp_path)
    (tmp_path / "head.json").write_text("{")
    assert "no head that can be read" in refusal(shelf / "target", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refusal(shelf / "target", tmp_path)


def copy(source, folder):
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


def test_words_that_do_not_go_with_a_head(shelf):
    assert "--drafter-quantize" in refusal(shelf / "target", shelf / "head", drafter_quantize="int8")
    assert "embedded target's own" in refusal(shelf / "target", "head")


def test_layers_that_a_head_reads():
    assert [feature_layers(count) for count in (1, 2, 4, 30)] == [(1, -1), (1, -1), (1, 3, -1), (7, 22, -1)]
