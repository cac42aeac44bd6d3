"""Drafters whose format is not supported, and pickled weights, are refused in one sentence that says what to do."""

from __future__ import annotations

import pytest
import torch
from drafter_checkpoints import (
    HIDDEN,
    VOCABULARY,
    eagle3_tensors,
    layer_keys,
    layer_shapes,
    random_tensors,
    write_checkpoint,
)
from safetensors.torch import load_file
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer

MLA = "midlayer.self_attn.kv_a_proj_with_mqa.weight"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The folder of a target. Tests do not change it."""
    return save_folder(
        tmp_path_factory.mktemp("target") / "target",
        tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=6),
        tiny_tokenizer(),
    )


@pytest.mark.parametrize(
    ("config", "names", "words"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, [MLA, "fc.weight"], ("Eagle3DeepseekV2",)),
        ({"speculators_model_type": "unheard-of"}, ["fc.weight"], ("speculators unheard-of",)),
        ({"model_type": "muse_glimmer_assistant"}, ["encoder.fc.weight"], ("muse_glimmer_assistant",)),
        ({"architectures": ["HydraEagleModel"]}, ["fc.weight"], ("HydraEagleModel",)),
        ({"model_type": "medusa"}, ["blocks.0.layers.0.weight"], ("medusa",)),
        ({"medusa_num_heads": 2}, ["0.0.linear.weight", "0.1.weight"], ("medusa",)),
        ({"speculators_model_type": "eagle"}, ["fusion_fc.weight"], ("speculators eagle",)),
    ],
)
def test_unsupported_drafters_are_refused_by_name(target_folder, tmp_path, config, names, words):
    tensors = {name: torch.zeros(HIDDEN, HIDDEN) for name in names}
    sentence = refusal(target_folder, write_checkpoint(tmp_path / "drafter", layer_keys() | config, tensors))
    assert all(word in sentence for word in words) and "EAGLE-3" in sentence


def test_eagle_is_recognised_by_its_tensors(target_folder, tmp_path):
    tensors = random_tensors(layer_shapes("layers.0.") | {"fc.weight": (HIDDEN, 2 * HIDDEN)}, seed=1)
    folder = write_checkpoint(tmp_path / "drafter", layer_keys(architectures=["LlamaForCausalLM"]), tensors)
    assert "the format EAGLE, which is not supported" in refusal(target_folder, folder)


@pytest.mark.parametrize("key", ["architectures", "speculators_config", "num_depths", "transformer_layer_config"])
@pytest.mark.parametrize("value", ["text", 5, [3], {"proposal_methods": 7}])
def test_configs_of_odd_types_are_refused_in_one_sentence(target_folder, tmp_path, key, value):
    shapes = {"mask_hidden": (1, 1, 3 * HIDDEN), "embed_tokens.weight": (VOCABULARY + 1, HIDDEN)}
    tensors = eagle3_tensors({}) | random_tensors(shapes, seed=3)
    config = layer_keys(mask_token_id=VOCABULARY) | {key: value}
    folder = write_checkpoint(tmp_path / "drafter", config, tensors)
    if (key == "num_depths" and value == 5) or key == "architectures":  # which P-EAGLE does not need
        assert load(target_folder, folder).drafter_kind == "P-EAGLE"
    else:
        assert "drafter" in refusal(target_folder, folder)


def test_the_conversion_in_the_message_about_pickled_weights_works(target_folder, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "drafter", layer_keys(), {"fc.weight": torch.ones(2, 4)})
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.ones(2, 4)}, folder / "pytorch_model.bin")
    sentence = refusal(target_folder, folder)
    _, found, code = sentence.partition("convert them in Python with ")
    monkeypatch.chdir(folder)
    assert found
    exec(f"import torch, safetensors.torch; {code.removesuffix('.')}", {})
    assert load_file("model.safetensors").keys() == {"fc.weight"}
