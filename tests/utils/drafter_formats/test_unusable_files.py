"""Values and files of published drafters that cannot be used are refused in a sentence that names them, before anything
large is allocated.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_checkpoints import (
    HIDDEN,
    SIZE,
    VOCABULARY,
    eagle3_tensors,
    layer_keys,
    random_tensors,
    speculators_config,
    write_checkpoint,
)
from drafter_runs import draft_rounds, hidden_states, loaded
from eagle3_reference import Eagle3Reference
from safetensors.torch import load_file, save_file
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer
from torch import nn

from utils.errors import UserError

LAYERS, READ = 6, (2, 3, 4)
IDS = "eagle_aux_hidden_state_layer_ids"


def target_model() -> Any:
    return tiny_llama(num_hidden_layers=LAYERS, vocab_size=VOCABULARY)


def refused(folder: Path, name: str = "EAGLE-3") -> str:
    with pytest.raises(UserError) as raised:
        loaded(folder, target_model(), name)
    return str(raised.value)


def test_heads_need_not_divide_the_hidden_size(tmp_path):
    """transformers refuses such a Llama even if its config has head_dim; the programs that train drafters do not."""
    heads, tensors = 3, eagle3_tensors({})
    for name, rows in (("q", heads * SIZE), ("k", SIZE), ("v", SIZE)):
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = torch.randn(rows, 2 * HIDDEN) * 0.2
    tensors["layers.0.self_attn.o_proj.weight"] = torch.randn(HIDDEN, heads * SIZE) * 0.2
    keys, target = layer_keys(num_attention_heads=heads, num_key_value_heads=1), target_model()
    drafter = loaded(write_checkpoint(tmp_path, keys | {IDS: list(READ)}, tensors), target, "EAGLE-3")
    features, embedded = hidden_states(target, READ), target.model.embed_tokens.weight
    reference, chosen = Eagle3Reference(tensors, keys, {}, 1), tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        expected = torch.stack(reference.drafts(features[:end], embedded[torch.tensor(drafted)], 3))
        assert torch.allclose(logits[:, chosen], expected, atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The folder of a target. Tests do not change it."""
    return save_folder(tmp_path_factory.mktemp("target") / "target", target_model(), tiny_tokenizer())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", "four"),
        ("num_attention_heads", 0),
        ("head_dim", 8.5),
        ("hidden_act", "swish9"),
        ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "spiral"}),
        ("rope_scaling", {"rope_type": "linear", "factor": "two"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),  # drafts would fail
        ("eagle_config", "none"),
        (IDS, "1,2,3"),
        (IDS, [1, None, 2]),
        ("target_layer_ids", 3),
        ("mask_token_id", "none"),
        ("proposal_methods", 3),
    ],
)
def test_values_that_cannot_be_used_are_refused_in_one_sentence(target_folder, tmp_path, key, value):
    tensors = eagle3_tensors({})
    if key in ("mask_token_id", "proposal_methods"):  # of a parallel drafter
        tensors |= random_tensors({"mask_hidden": (1, 1, 3 * HIDDEN)}, seed=3)
    nested = {"speculators_config": {key: value}} if key == "proposal_methods" else {key: value}
    folder = write_checkpoint(tmp_path / "drafter", layer_keys(mask_token_id=1) | nested, tensors)
    assert "'drafter'" in refusal(target_folder, folder)


@pytest.mark.parametrize(
    ("name", "tensor", "word"),
    [
        ("lm_head.weight", torch.zeros(HIDDEN), "output head"),
        ("embed_tokens.weight", torch.zeros(HIDDEN), "embedding"),
        ("fc.weight", torch.ones(HIDDEN, 3 * HIDDEN, dtype=torch.int8), "int8"),
        ("lm_head.weight", torch.ones(VOCABULARY // 2, HIDDEN).to(torch.float8_e4m3fn), "float8"),
    ],
)
def test_tensors_of_other_kinds_are_refused(tmp_path, name, tensor, word):
    tensors = eagle3_tensors({}) | {name: tensor}
    assert word in refused(write_checkpoint(tmp_path, speculators_config({}), tensors))


@pytest.mark.parametrize("change", ["no d2t", "no d2t or t2d", "a d2t of all tokens"])
def test_a_draft_vocabulary_without_its_ids_is_refused(tmp_path, change):
    """Its rows were taken for the first ids, and hardly any draft was right."""
    tensors, keys = eagle3_tensors({}), layer_keys()
    if change == "a d2t of all tokens":
        tensors["d2t"] = torch.zeros(VOCABULARY, dtype=torch.int64)
        del tensors["t2d"]
    else:
        del tensors["d2t"]
    if change == "no d2t or t2d":
        del tensors["t2d"]
        keys |= {"vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY // 2}
    assert "d2t" in refused(write_checkpoint(tmp_path, keys, tensors))


def test_an_epsilon_may_be_a_whole_number(tmp_path):
    folder = write_checkpoint(tmp_path, layer_keys(rms_norm_eps=1), eagle3_tensors({}))
    assert loaded(folder, target_model(), "EAGLE-3").config.rms_norm_eps == 1.0


def test_a_damaged_tensor_has_the_name_of_its_file(tmp_path):
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in eagle3_tensors({}).items()}
    tensors["midlayer.hidden_norm.weight"].fill_(float("nan"))
    assert "midlayer.hidden_norm.weight" in refused(write_checkpoint(tmp_path, layer_keys(), tensors))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("keys", [{"pard_token": 5}, {}])
def test_a_model_with_weights_in_8_bits_is_refused(target_folder, tmp_path, keys, dtype):
    """transformers casts them to floats. Without a config of the quantization, nobody knows their scale."""
    folder = save_folder(tmp_path / "drafter", target_model(), tiny_tokenizer())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | keys
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    write_checkpoint(folder, config, tensors | {name: torch.ones(tensors[name].shape).to(dtype)})
    sentence = refusal(target_folder, folder)
    assert name in sentence and "quantized" in sentence and str(dtype).removeprefix("torch.") in sentence


def test_no_random_weights_are_made(tmp_path, monkeypatch):
    """They took seconds and memory before the stored ones replaced them, and longest for a config of wrong sizes."""
    target, made = target_model(), []
    monkeypatch.setattr(nn.init, "kaiming_uniform_", lambda part, **_: made.append(0 if part.is_meta else part.numel()))
    loaded(write_checkpoint(tmp_path / "right", layer_keys(), eagle3_tensors({})), target, "EAGLE-3")
    with pytest.raises(UserError, match="fc"):
        loaded(write_checkpoint(tmp_path / "wrong", {"rms_norm_eps": 1e-5}, eagle3_tensors({})), target, "EAGLE-3")
    assert made and not any(made)


def shards(folder: Path, weight_map: Any) -> Path:
    """A folder with an index and one of its two files."""
    write_checkpoint(folder, layer_keys() | {IDS: list(READ)}, eagle3_tensors({}))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("weight_map", "word"),
    [
        ({"fc.weight": "model-1.safetensors", "norm.weight": "model-2.safetensors"}, "model-2.safetensors"),
        (["model-1.safetensors"], "'drafter'"),
        ({"fc.weight": 3}, "'drafter'"),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(target_folder, tmp_path, weight_map, word):
    """It was taken for a model, and the errors were those of a model."""
    assert word in refusal(target_folder, shards(tmp_path / "drafter", weight_map))


def test_a_whole_file_comes_before_an_index(target_folder, tmp_path):
    folder = shards(tmp_path / "drafter", {"fc.weight": "model-2.safetensors"})
    save_file(eagle3_tensors({}), folder / "model.safetensors")
    assert "EAGLE-3" in str(load(target_folder, folder).drafter_name)


def test_remarks_of_libraries_about_a_config_are_not_shown(target_folder, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = write_checkpoint(tmp_path / "drafter", layer_keys(rope_parameters=yarn), eagle3_tensors({}))
    shown, logger = logging.handlers.BufferingHandler(9), logging.getLogger("transformers")
    logger.addHandler(shown)
    try:
        load(target_folder, folder)
    finally:
        logger.removeHandler(shown)
    assert [record.getMessage() for record in shown.buffer] == []
