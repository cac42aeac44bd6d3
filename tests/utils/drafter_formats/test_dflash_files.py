"""DFlash and DSpark checkpoints as files: layouts, pairs, texts, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from dflash_checkpoints import BLOCK, VOCABULARY, built, speculators_config, target_model, tensors_of, zlab_config
from drafter_checkpoints import HIDDEN, layer_keys, write_checkpoint
from drafter_runs import check_texts
from shelf import load, refusal
from tiny import save_folder, tiny_tokenizer

from sampling import AdaptiveGamma
from sampling.drafters.feature_sessions import feature_session
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.models.load_errors import explained_errors
from utils.pairs.doctor import other_readings

DSPARK = {"markov_rank": 5, "markov_head_type": "vanilla", "confidence_head_with_markov": True}


def dspark_tensors() -> Any:
    return tensors_of(markov=5, confidence=HIDDEN + 5, own=True)


def deepspec_config() -> dict[str, Any]:
    return layer_keys(
        architectures=["Qwen3DSparkModel"], block_size=BLOCK, mask_token_id=60, target_layer_ids=[1, 2, 3], **DSPARK
    )


def specforge_config() -> dict[str, Any]:
    nested = {"projector_type": "dspark", "mask_token_id": 60, "target_layer_ids": [1, 2, 3]} | DSPARK
    return layer_keys(architectures=["DSparkDraftModel"], dflash_config=nested | {"block_size": BLOCK})


@pytest.mark.parametrize(
    ("config", "prefix"), [(deepspec_config, ""), (deepspec_config, "model."), (specforge_config, "logit_head.")]
)
def test_layouts_give_the_same_dspark_drafter(tmp_path, config, prefix):
    target, tensors = target_model(), dspark_tensors()
    first = built(write_checkpoint(tmp_path / "a", speculators_config(kind="dspark"), tensors), target, "DSpark")
    moved = (lambda name: "head." in name and "lm_head" not in name) if prefix == "logit_head." else (lambda name: True)
    renamed = {f"{prefix}{name}" if moved(name) else name: tensor for name, tensor in tensors.items()}
    second = built(write_checkpoint(tmp_path / "b", config(), renamed), target, "DSpark")
    for name in ("slots", "mask_token", "windows", "target_layers", "conventions"):
        assert getattr(first, name) == getattr(second, name)
    assert first.block_size == BLOCK
    weights = second.state_dict()
    assert all(torch.equal(part, weights[name]) for name, part in first.state_dict().items())


def test_dspark_without_heads_is_recognised_by_name(tmp_path):
    folder = write_checkpoint(tmp_path, zlab_config(projector_type="dspark", markov_rank=0), tensors_of())
    assert built(folder, target_model(), "DSpark").block_size == BLOCK


@pytest.mark.parametrize(
    ("rule", "adaptive"),
    [
        *(("coupled", True), ("rejection", False)),
        *(pytest.param(*choice, marks=pytest.mark.full) for choice in (("coupled", False), ("rejection", True))),
    ],
)
def test_the_text_is_the_targets_own(tmp_path, rule, adaptive):
    """A drafter of a tiny vocabulary is often right, and often wrong. It reads both ends of the target."""
    target = target_model(vocab_size=8)
    tensors = tensors_of(markov=5, confidence=HIDDEN, own=True, vocabulary=8)
    config = speculators_config(kind="dspark", mask_token_id=7, aux_hidden_state_layer_ids=[0, 3, 6])
    drafter = built(write_checkpoint(tmp_path, config, tensors), target, "DSpark")
    gamma = (
        partial(AdaptiveGamma, Costs.of([0.02] * 8, {"toy": 0.01}), kind="toy", block=BLOCK)
        if adaptive
        else lambda: None
    )
    check_texts(target, drafter, rule, gamma)


def test_a_folder_is_loaded_as_the_drafter_of_a_pair(tmp_path):
    save_folder(tmp_path / "target", target_model(vocab_size=300), tiny_tokenizer())
    folder = write_checkpoint(tmp_path / "drafter", zlab_config(), tensors_of())
    pair = load(tmp_path / "target", folder)
    assert pair.drafter_kind == "DFlash" and "DFlash" in str(pair.drafter_name)
    assert pair.feature_layers == (2, 3, 5)


CHANGES = [
    (lambda tensors, config: tensors.pop("layers.0.mlp.up_proj.weight"), "up_proj"),
    (lambda tensors, config: tensors.pop("layers.0.self_attn.q_norm.weight"), "q_norm"),
    (lambda tensors, config: tensors["fc.weight"].fill_(float("nan")), "finite"),
    (lambda tensors, config: tensors.update({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}), "numbers per token"),
    (lambda tensors, config: tensors.update({"embed_tokens.weight": torch.zeros(20, HIDDEN)}), "embedding"),
    (lambda tensors, config: tensors.update({"prefix_gru.weight_ih_l0": torch.zeros(3, 3)}), "prefix_gru"),
    (lambda tensors, config: tensors.update({"markov_head.gate_proj.weight": torch.zeros(3, 3)}), "gate_proj"),
    (lambda tensors, config: tensors.update({"markov_head.markov_w2.weight": torch.zeros(9, 5)}), "Markov head"),
    (lambda tensors, config: tensors.update({"markov_head.markov_w1.weight": torch.zeros(9, 5)}), "Markov head"),
    (lambda tensors, config: tensors.update({"markov_head.markov_w1.weight": torch.zeros(9)}), "not enough values"),
    (lambda tensors, config: tensors.update({"confidence_head.proj.weight": torch.zeros(1, 40)}), "confidence"),
    (lambda tensors, config: config.update({"markov_head_type": "rnn"}), "joint_proj"),
    (lambda tensors, config: config.update({"markov_head_type": "conv"}), "conv"),
    (lambda tensors, config: config.update({"speculators_model_type": "dflash2"}), "dflash2"),
    (lambda tensors, config: config.update({"speculators_model_type": "xpress"}), "xpress"),
    (lambda tensors, config: config.update({"mask_token_id": None}), "mask_token_id"),
    (lambda tensors, config: config.update({"mask_token_id": VOCABULARY}), f"to {VOCABULARY - 1}"),
    (lambda tensors, config: config.update({"block_size": 10**12}), "block_size"),
    (lambda tensors, config: config.update({"block_size": 1, "sample_from_anchor": False}), "block_size"),
    (lambda tensors, config: config.update({"block_size": "7"}), "block_size"),
    (lambda tensors, config: config.update({"aux_hidden_state_layer_ids": [1, 2, 99]}), "99"),
    (lambda tensors, config: config.update({"aux_hidden_state_layer_ids": ["1", 2, 3]}), "hidden state 1"),
    (lambda tensors, config: config["transformer_layer_config"].update({"layer_types": ["chunked"]}), "layer_types"),
    (lambda tensors, config: config["transformer_layer_config"].update({"intermediate_size": 40}), "proj"),
]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The folder of a target. Tests do not change it."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    return save_folder(folder, target_model(vocab_size=VOCABULARY), tiny_tokenizer())


@pytest.mark.parametrize(("change", "word"), CHANGES)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(target_folder, tmp_path, change, word):
    tensors, config = dspark_tensors(), speculators_config(kind="dspark")
    change(tensors, config)
    assert word in refusal(target_folder, write_checkpoint(tmp_path / "drafter", config, tensors))


def test_the_other_readings_of_a_checkpoint_take_effect(tmp_path):
    drafter = built(write_checkpoint(tmp_path, zlab_config(), tensors_of()), target_model(), "DFlash")
    readings = other_readings(drafter)
    assert {reading.feature_layers for reading in readings.values()} == {(2, 3, 5), (3, 4, 7), (3, 4, 6), (1, 2, 4)}
    anchored = [reading for reading in readings.values() if reading.from_anchor]
    assert len(anchored) == 1 and drafter.block_size == BLOCK - 1
    drafter.conventions = anchored[0]
    assert drafter.block_size == feature_session(drafter).block_size == BLOCK


KEYS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "sample_from_anchor", "projector_type")
KEYS += (
    "dflash_config",
    "layer_types",
    "sliding_window",
    "markov_head_type",
    "architectures",
    "transformer_layer_config",
)


@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_a_key_is_read_or_refused(tmp_path, key, nested):
    target, tensors = target_model(), dspark_tensors()
    for value in ["x", [], ["x"], [[1]], {}, {"x": 1}, -1, 0, 1.5, 10**30, True, [None]]:
        config = specforge_config()
        (config["dflash_config"] if nested else config)[key] = value
        try:
            with explained_errors("drafter"):
                drafter = built(write_checkpoint(tmp_path, config, tensors), target, "DSpark")
        except UserError as error:
            assert str(error).endswith(".")
        else:
            assert drafter.feature_layers == (2, 3, 4) and drafter.block_size in (BLOCK, BLOCK - 1)
