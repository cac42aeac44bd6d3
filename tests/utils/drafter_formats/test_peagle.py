"""P-EAGLE drafters compute a block as the equations say, forget it afterwards, and change no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_checkpoints import (
    HIDDEN,
    VOCABULARY,
    eagle3_tensors,
    layer_keys,
    random_tensors,
    speculators_config,
    write_checkpoint,
)
from drafter_runs import check_texts, draft_rounds, hidden_states, loaded
from eagle3_reference import Eagle3Reference
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer

from utils.pairs.doctor import other_readings

LAYERS, READ, MASK = 6, (2, 3, 4), VOCABULARY + 2  # a mask token beyond the target's vocabulary
FLAGS = ({}, {"norm_before_residual": True, "fc_norm": True}, {"norm_before_fc": True, "norm_output": True})


def tensors_of(flags: dict[str, Any], *, size: int = VOCABULARY, **others: Any) -> Any:
    shapes = {"mask_hidden": (1, 1, 3 * HIDDEN), "embed_tokens.weight": (size + 4, HIDDEN)}
    return eagle3_tensors(flags, **others) | random_tensors(shapes, seed=3)


def proposal(count: int) -> dict[str, Any]:
    return {"speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}]}}


def config_of(flags: dict[str, Any], count: int, **others: Any) -> dict[str, Any]:
    named = {"speculators_model_type": "peagle", "mask_token_id": MASK, "eagle_aux_hidden_state_layer_ids": list(READ)}
    return speculators_config(flags, **named, **proposal(count)) | others


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("layers", "head_norms"), [(4, False), (2, True)])
@pytest.mark.parametrize("flags", FLAGS)
def test_blocks_are_those_of_the_equations(tmp_path, flags, layers, head_norms, count):
    """The tokens of the drafts must not matter, and nothing of a block may be left in the next one."""
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of(flags, layers=layers, head_norms=head_norms)
    drafter = loaded(write_checkpoint(tmp_path, config_of(flags, count), tensors), target, "P-EAGLE")
    features, reference = hidden_states(target, READ), Eagle3Reference(tensors, layer_keys(), flags, layers)
    chosen = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    for end, drafted, logits in draft_rounds(drafter, features, count):
        embedded = tensors["embed_tokens.weight"][torch.tensor(drafted[:end] + [MASK] * (count - 1))]
        expected = reference.block(features[:end], embedded, count)
        assert torch.allclose(logits[:, chosen], expected, atol=2e-4, rtol=1e-4)
        assert int(torch.isneginf(logits).sum()) == count * (VOCABULARY - len(chosen))


def flat_names(tensors: Any) -> Any:
    """The layout of checkpoints for vLLM: only the first layer has a name of its own."""
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("config", "count"),
    [({"ptd_token_id": str(MASK)}, 8), ({"pard_token": MASK, "num_depths": 5}, 5), ({"mask_token_id": MASK}, 8)],
)
def test_layouts_give_the_same_drafter(tmp_path, config, count):
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of({}, layers=4)
    first = loaded(write_checkpoint(tmp_path / "a", config_of({}, 3), tensors), target, "P-EAGLE")
    keys = layer_keys(eagle_aux_hidden_state_layer_ids=list(READ)) | config
    second = loaded(write_checkpoint(tmp_path / "b", keys, flat_names(tensors)), target, "P-EAGLE")
    assert (first.block_size, second.block_size) == (3, count) and first.mask_token == second.mask_token == MASK
    weights = second.state_dict()
    assert all(torch.equal(part, weights[name]) for name, part in first.state_dict().items())


def test_another_reading_takes_effect_at_once(tmp_path):
    target = tiny_llama(num_hidden_layers=LAYERS)
    drafter = loaded(write_checkpoint(tmp_path, config_of({}, 3), tensors_of({})), target, "P-EAGLE")
    readings = other_readings(drafter)
    assert {layers for reading in readings.values() for layers in reading.feature_layers} == {1, 2, 3, 4, 5}
    assert len(readings) == len(set(readings.values())) == 3
    before = next(draft_rounds(drafter, hidden_states(target, READ), 3))[2]
    drafter.conventions = readings["the other residual in the first layer"]
    assert not torch.allclose(next(draft_rounds(drafter, hidden_states(target, READ), 3))[2], before, atol=1e-2)


@pytest.mark.parametrize("rule", ["coupled", pytest.param("rejection", marks=pytest.mark.full)])
def test_the_text_is_the_targets_own(tmp_path, rule):
    target, tensors = tiny_llama(num_hidden_layers=LAYERS, vocab_size=8), tensors_of({}, size=8, every=1, layers=2)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:8].clone()
    config = config_of({}, 3, mask_token_id=9)
    check_texts(target, loaded(write_checkpoint(tmp_path, config, tensors), target, "P-EAGLE"), rule)


def test_a_folder_is_loaded_as_the_drafter_of_a_pair(tmp_path):
    save_folder(tmp_path / "target", tiny_llama(vocab_size=300, num_hidden_layers=LAYERS), tiny_tokenizer())
    tensors = tensors_of({}, size=300, every=1) | {"lm_head.weight": torch.randn(300, HIDDEN)}
    pair = load(tmp_path / "target", write_checkpoint(tmp_path / "drafter", config_of({}, 4), tensors))
    assert pair.drafter_kind == "P-EAGLE" and "P-EAGLE" in str(pair.drafter_name) and pair.feature_layers == READ


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The folder of a target. Tests do not change it."""
    return save_folder(
        tmp_path_factory.mktemp("target") / "target",
        tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=LAYERS),
        tiny_tokenizer(),
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors, config: config.pop("mask_token_id"), "mask token"),
        (lambda tensors, config: config.update({"mask_token_id": 99}), "mask token is 99"),
        (lambda tensors, config: config.update(proposal(400)), "400"),
        (lambda tensors, config: tensors.update({"mask_hidden": torch.zeros(1, 1, HIDDEN)}), "mask_hidden"),
        (lambda tensors, config: tensors["mask_hidden"].fill_(float("nan")), "finite"),
        (lambda tensors, config: tensors.pop("mask_hidden"), "no tensor mask_hidden"),
        (lambda tensors, config: tensors.pop("layers.1.mlp.up_proj.weight"), "up_proj"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(target_folder, tmp_path, change, word):
    tensors, config = tensors_of({}, layers=2), config_of({}, 4)
    change(tensors, config)
    assert word in refusal(target_folder, write_checkpoint(tmp_path / "drafter", config, tensors))
