"""Assistants for Gemma 4 draft what transformers' own module does with the target's keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_runs import TOKENS, check_texts, draft_rounds, loaded
from gemma4_checkpoints import (
    HIDDEN,
    LAYERS,
    tiny_assistant,
    tiny_gemma4,
    tiny_unified,
    tiny_unified_assistant,
    tiny_with_images,
)
from safetensors.torch import load_file, save_file
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from utils.decode.model_session import ModelSession
from utils.engine import Engine
from utils.pairs.doctor import examine

NAME = "Gemma-4-assistant"
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}


def written(folder: Path, assistant: Any, change: Any = None, **keys: Any) -> Path:
    """Write an assistant's folder. change: of its tensors. keys: further ones for its config."""
    assistant.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= keys.pop("text_config", {})
    (folder / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


@torch.no_grad()
def target_outputs(target: Any, count: int) -> tuple[Tensor, dict[str, Any]]:
    """The last hidden state (1, 1, H) of the first tokens, and the keys and values of all of them by layer type."""
    text, cache = target.config.get_text_config(decoder=True), DynamicCache()  # which keeps more than a window
    output = target(torch.tensor([TOKENS[:count]]), past_key_values=cache, output_hidden_states=True)
    own = text.num_hidden_layers - text.num_kv_shared_layers
    shared = {kind: (cache.layers[i].keys, cache.layers[i].values) for i, kind in enumerate(text.layer_types[:own])}
    return output.hidden_states[-1][:, -1:], shared


@torch.no_grad()
def module_drafts(assistant: Any, target: Any, end: int, tokens: list[int]) -> Tensor:
    """Logits (k, V) of transformers' module for drafts after position `end`, each fed the next of the tokens (k,)."""
    state, shared = target_outputs(target, end)
    rows = []
    for token in tokens:
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        output = assistant(
            inputs_embeds=torch.cat([embedded, state], dim=-1),
            position_ids=torch.tensor([[end]]),
            shared_kv_states=shared,
        )
        state = output.last_hidden_state
        rows.append(output.logits[0, 0])
    return torch.stack(rows)


def features_of(drafter: Any, target: Any) -> Tensor:
    session = ModelSession(target, features=drafter.feature_layers, rewinds=False)
    session.feed(session.begin(TOKENS), keep=1)
    features = session.take_features()
    assert features is not None
    return features


def check_rounds(assistant: Any, target: Any, drafter: Any, count: int = 4) -> None:
    features = features_of(drafter, target)
    for end, drafted, logits in draft_rounds(drafter, features, count):
        expected = module_drafts(assistant, target, end, drafted[end - 1 : end - 1 + count])
        assert torch.allclose(logits, expected, atol=1e-4), (end, (logits - expected).abs().max())


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared keys": ({}, {}),
    "no layer of the target shares": ({"num_kv_shared_layers": 0}, {}),
    "keys that are values": ({"attention_k_eq_v": True}, {"num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "centroids": ({}, {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}),
    "full attention only": ({}, {"layer_types": ["full_attention"] * 3}),
    "a window that holds everything": ({"sliding_window": 64}, {"sliding_window": 64}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_drafts_are_those_of_transformers(tmp_path, monkeypatch, case):
    """Over rounds of different lengths whose drafts are all rejected."""
    of_target, of_assistant = CHANGES[case]
    target, assistant = tiny_gemma4(**of_target), tiny_assistant(monkeypatch, **of_assistant)
    drafter = loaded(written(tmp_path, assistant), target, NAME)
    own = LAYERS - target.config.num_kv_shared_layers
    assert drafter.feature_layers == (own - 2, own - 1, LAYERS)
    check_rounds(assistant, target, drafter)


def test_drafts_for_unified_targets_are_those_of_transformers(tmp_path, monkeypatch):
    target, assistant = tiny_unified(), tiny_unified_assistant(monkeypatch)
    check_rounds(assistant, target, loaded(written(tmp_path, assistant), target, NAME))


def test_a_target_that_can_read_images_has_the_same_drafts(tmp_path, monkeypatch):
    target, assistant = tiny_with_images(), tiny_assistant(monkeypatch)
    check_rounds(assistant, target, loaded(written(tmp_path, assistant), target, NAME))


def test_greedy_drafts_after_a_prompt_are_those_of_assisted_generation(tmp_path, monkeypatch):
    """Only after a prompt: later, transformers 5.23 leaves keys of rejected drafts in what it hands over."""
    target, assistant = tiny_gemma4(), tiny_assistant(monkeypatch)
    assistant.generation_config.num_assistant_tokens = 4
    target.generation_config.max_length = 64
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), target.generation_config
    )
    with torch.no_grad():
        flags = {"output_hidden_states": True, "return_shared_kv_states": True}
        output = target(torch.tensor([TOKENS[:7]]), **flags)
        tokens, expected = generator.get_candidates(torch.tensor([TOKENS[:8]]), {}, output, False, 0)
    drafted = tokens[0, 8:].tolist()
    drafter = loaded(written(tmp_path, assistant), target, NAME)
    assert torch.allclose(expected[0], module_drafts(assistant, target, 7, [TOKENS[7], *drafted[:-1]]), atol=1e-4)
    features = features_of(drafter, target)
    monkeypatch.setattr("drafter_runs.DRAFTS", drafted)
    monkeypatch.setattr("drafter_runs.ROUNDS", (7,))
    [(_, _, logits)] = draft_rounds(drafter, features, 4)
    assert torch.allclose(logits, expected[0], atol=1e-4) and logits.argmax(-1).tolist() == drafted


@pytest.mark.parametrize(("rule", "shared"), [("coupled", 0), ("rejection", 2)])
def test_the_text_is_the_targets_own(tmp_path, monkeypatch, rule, shared):
    target = tiny_gemma4(vocab_size=8, vocab_size_per_layer_input=8, num_kv_shared_layers=shared)
    assistant = tiny_assistant(monkeypatch, seed=2, vocab_size=8)
    check_texts(target, loaded(written(tmp_path, assistant), target, NAME), rule)


@pytest.mark.parametrize("rule", [pytest.param("coupled", marks=pytest.mark.full), "rejection"])
def test_the_text_is_the_targets_own_under_an_engine(tmp_path, monkeypatch, rule):
    """The engine replaces layers of the target and of the drafter, which then shares none of them."""
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 64, "global_head_dim": 16}  # few, for compilation
    target = tiny_unified(**sizes, **TWO_LAYERS)
    drafter = loaded(written(tmp_path, tiny_unified_assistant(monkeypatch, seed=4, **sizes)), target, NAME)
    assert Engine([target], helpers=[drafter]).use("invariant", 1).verified
    check_texts(target, drafter, rule)


@pytest.mark.parametrize("build", [tiny_gemma4, tiny_with_images])
def test_a_folder_is_loaded_as_the_drafter_of_a_pair(tmp_path, monkeypatch, build):
    folder = save_folder(tmp_path / "target", build(**LARGE), tiny_tokenizer())
    pair = load(folder, written(tmp_path / "drafter", tiny_assistant(monkeypatch, vocab_size=300)))
    assert (pair.drafter_name, pair.drafter_kind) == (f"drafter ({NAME})", NAME)


def test_a_16_bit_target_keeps_exact_frequencies(tmp_path, monkeypatch):
    target = tiny_gemma4().bfloat16()
    drafter = loaded(written(tmp_path, tiny_assistant(monkeypatch)), target, NAME)
    assert {part.dtype for part in drafter.parameters()} == {torch.bfloat16}
    assert drafter.rotary.full_attention_inv_freq.dtype is torch.float32
    for _, _, logits in draft_rounds(drafter, features_of(drafter, target), 2):
        assert torch.isfinite(logits.float()).all()


def test_the_doctor_can_examine_it(tmp_path, monkeypatch):
    target = tiny_gemma4()
    drafter = loaded(written(tmp_path, tiny_assistant(monkeypatch)), target, NAME)
    text = torch.randint(64, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(examine(drafter, target, text, 2).readings) == 1


LARGE = {"vocab_size": 300, "vocab_size_per_layer_input": 300}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The folder of a target with a tokenizer. Tests do not change it."""
    return save_folder(tmp_path_factory.mktemp("large") / "target", tiny_gemma4(**LARGE | TWO_LAYERS), tiny_tokenizer())


CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 10, "centroid_intermediate_top_k": 3}


@pytest.mark.parametrize(
    ("assistant", "keys", "change", "word"),
    [
        ({"vocab_size": 64}, {}, None, "64 tokens"),
        ({"head_dim": 8}, {}, None, "keys of the sizes"),
        ({"num_key_value_heads": 4}, {}, None, "keys of the sizes"),
        ({"backbone_hidden_size": 2 * HIDDEN}, {}, None, "hidden states of size"),
        ({}, {"text_config": {"num_hidden_layers": "three"}}, None, "config.json"),
        ({}, {"text_config": {"intermediate_size": 41}}, None, "differ from its config.json"),
        ({}, {}, lambda tensors: tensors.pop("model.layers.1.layer_scalar"), "layer_scalar"),
        ({}, {}, lambda tensors: tensors["pre_projection.weight"].fill_(float("nan")), "finite"),
        (CENTROIDS, {}, lambda tensors: tensors["masked_embedding.token_ordering"].fill_(3), "token_ordering"),
        (CENTROIDS, {"num_centroids": 7}, None, "centroids"),
        (CENTROIDS, {"centroid_intermediate_top_k": 0}, None, "could not be loaded"),  # drafts would fail
    ],
)
def test_assistants_that_do_not_fit_are_refused_in_one_sentence(
    large, tmp_path, monkeypatch, assistant, keys, change, word
):
    made = tiny_assistant(monkeypatch, **{"vocab_size": 300} | assistant)
    assert word in refusal(large, written(tmp_path / "drafter", made, change, **keys))


def test_other_targets_are_refused_in_one_sentence(tmp_path, monkeypatch):
    folder = save_folder(tmp_path / "target", tiny_llama(vocab_size=300), tiny_tokenizer())
    assert "gemma4_text" in refusal(folder, written(tmp_path / "drafter", tiny_assistant(monkeypatch)))
