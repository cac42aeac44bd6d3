"""EAGLE, EAGLE-2 and HASS drafters compute what the equations say, in both layouts, and change no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_checkpoints import HIDDEN, VOCABULARY, layer_keys, layer_shapes, random_tensors, write_checkpoint
from drafter_runs import check_texts, draft_rounds, hidden_states, loaded
from eagle1_reference import Eagle1Reference
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer

LAYERS = 3
BIASES = {f"layers.0.self_attn.{name}_proj.bias": (size,) for name, size in (("q", 64), ("k", 32), ("v", 32))}
NORMS = ("layers.0.input_layernorm", "embedding_layernorm", "pre_lm_head_layernorm")


def tensors_of(*, layers: int = 1, biases: dict[str, Any] | None = None, norms: bool = False) -> Any:
    """Weights in SafeAILab's layout. norms: with the optional ones of speculators."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | (biases or {})
    for index in range(layers):
        shapes |= layer_shapes(f"layers.{index}.")
    del shapes["layers.0.input_layernorm.weight"]
    if norms:
        shapes |= {f"{name}.weight": (HIDDEN,) for name in NORMS}
    # Without norms, states would grow with every step until attention sees a single position.
    return {name: part if "norm" in name else part * 0.4 for name, part in random_tensors(shapes, seed=1).items()}


def speculators_names(tensors: Any) -> Any:
    names = {name: name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.") for name in tensors}
    return {names[name]: tensor for name, tensor in tensors.items()}


def speculators_config(**others: Any) -> dict[str, Any]:
    keys = layer_keys(vocab_size=VOCABULARY, model_type="llama")
    return {"speculators_model_type": "eagle", "transformer_layer_config": keys} | others


PARTS = {
    "plain": {},
    "fc bias": {"biases": {"fc.bias": (HIDDEN,)}},
    "qkv bias": {"biases": BIASES},
    "2 layers": {"layers": 2},
    "norms": {"norms": True},
}


@pytest.mark.parametrize(
    ("name", "old"), [*((name, False) for name in PARTS if name != "norms"), ("plain", True), ("norms", True)]
)
def test_drafts_are_those_of_the_equations(tmp_path, name, old):
    """Over rounds of different lengths: the entries of rejected drafts must be dropped and computed anew. old: in
    the layout of speculators.
    """
    parts = PARTS[name]
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of(**parts)
    config = speculators_config() if old else layer_keys(architectures=["LlamaForCausalLMEagle"])
    folder = write_checkpoint(tmp_path, config, speculators_names(tensors) if old else tensors)
    drafter = loaded(folder, target, "EAGLE")
    assert drafter.feature_layers == (LAYERS,)
    features = target.model.norm(hidden_states(target, (LAYERS,))).detach()
    embedded = target.model.embed_tokens.weight
    reference = Eagle1Reference(tensors, layer_keys(), target.lm_head.weight, parts.get("layers", 1))
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        expected = torch.stack(reference.drafts(features[:end], embedded[torch.tensor(drafted)], 3))
        assert 0.1 < expected.std() < 30
        assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("old", [False, True])
def test_sliding_layers_attend_to_the_last_positions_only(tmp_path, old):
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of(layers=1 if old else 2)
    keys = layer_keys(layer_types=["sliding_attention", "full_attention"], sliding_window=3)
    config = {"speculators_model_type": "eagle", "transformer_layer_config": keys} if old else keys
    drafter = loaded(
        write_checkpoint(tmp_path, config, speculators_names(tensors) if old else tensors), target, "EAGLE"
    )
    features, embedded = target.model.norm(hidden_states(target, (LAYERS,))).detach(), target.model.embed_tokens.weight
    reference = Eagle1Reference(tensors, keys, target.lm_head.weight, 1 if old else 2)
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        expected = torch.stack(reference.drafts(features[:end], embedded[torch.tensor(drafted)], 3))
        assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4)


def test_an_embedding_of_its_own_is_used(tmp_path):
    target, tensors = tiny_llama(num_hidden_layers=LAYERS), tensors_of()
    tensors["embed_tokens.weight"] = random_tensors({"e": (VOCABULARY, HIDDEN)}, seed=4)["e"]
    drafter = loaded(write_checkpoint(tmp_path, layer_keys(), tensors), target, "EAGLE")
    assert torch.equal(drafter.embed_tokens.weight, tensors["embed_tokens.weight"])


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_text_is_the_targets_own(tmp_path, rule):
    target = tiny_llama(num_hidden_layers=LAYERS, vocab_size=8)
    check_texts(target, loaded(write_checkpoint(tmp_path, layer_keys(), tensors_of()), target, "EAGLE"), rule)


def test_a_folder_is_loaded_as_the_drafter_of_a_pair(tmp_path):
    save_folder(tmp_path / "target", tiny_llama(vocab_size=300), tiny_tokenizer())
    pair = load(tmp_path / "target", write_checkpoint(tmp_path / "drafter", layer_keys(), tensors_of()))
    assert pair.drafter_kind == "EAGLE" and "EAGLE" in str(pair.drafter_name) and pair.feature_layers == (2,)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"), "up_proj"),
        (lambda tensors: tensors.update({"layers.0.extra.weight": torch.zeros(2)}), "extra"),
        (lambda tensors: tensors["fc.weight"].fill_(float("inf")), "finite"),
        (lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(20, HIDDEN)}), "embedding"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(tmp_path, change, word):
    save_folder(tmp_path / "target", tiny_llama(vocab_size=300), tiny_tokenizer())
    tensors = tensors_of()
    change(tensors)
    assert word in refusal(tmp_path / "target", write_checkpoint(tmp_path / "drafter", layer_keys(), tensors))


def test_a_drafter_of_a_wider_target_is_refused(tmp_path):
    save_folder(tmp_path / "target", tiny_llama(vocab_size=300, hidden_size=16), tiny_tokenizer())
    folder = write_checkpoint(tmp_path / "drafter", layer_keys(), tensors_of())
    assert "32 numbers" in refusal(tmp_path / "target", folder)
