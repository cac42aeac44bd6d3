"""EAGLE-3 drafters in every layout compute what the equations say, read the right hidden states, and change no text."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from drafter_checkpoints import (
    GROUPS,
    HEADS,
    HIDDEN,
    SIZE,
    VOCABULARY,
    eagle3_tensors,
    layer_keys,
    random_tensors,
    speculators_config,
    write_checkpoint,
)
from drafter_runs import TOKENS, check_texts, draft_rounds, hidden_states, loaded
from eagle3_reference import Eagle3Reference
from shelf import load, refusal
from tiny import DECODER, build, save_folder, tiny_llama, tiny_tokenizer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from utils.decode.model_session import ModelSession
from utils.drafter_formats import eagle3
from utils.pairs.doctor import other_readings

LAYERS, READ = 6, (2, 3, 4)
FLAGS = (
    {},
    {"norm_before_residual": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
)


def target_model(**overrides: Any) -> Any:
    return tiny_llama(num_hidden_layers=LAYERS, **overrides)


@pytest.mark.parametrize(
    ("flags", "layers", "head_norms"), [*product(FLAGS, [1, 2], [False]), *product(FLAGS, [1], [True])]
)
def test_drafts_are_those_of_the_equations(tmp_path, flags, layers, head_norms):
    """Over rounds of different lengths: the entries of rejected drafts must be dropped and computed anew."""
    target, tensors = target_model(), eagle3_tensors(flags, layers=layers, head_norms=head_norms)
    config = speculators_config(flags, eagle_aux_hidden_state_layer_ids=list(READ))
    drafter = loaded(write_checkpoint(tmp_path, config, tensors), target, "EAGLE-3")
    features, embedded = hidden_states(target, READ), target.model.embed_tokens.weight
    reference = Eagle3Reference(tensors, layer_keys(), flags, layers)
    chosen = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        expected = reference.drafts(features[:end], embedded[torch.tensor(drafted)], 3)
        assert torch.allclose(logits[:, chosen], torch.stack(expected), atol=2e-4, rtol=1e-4)
        others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill_(0, chosen, False)
        assert torch.isneginf(logits[:, others]).all()


def test_all_layers_of_deepspec_read_the_embedding(tmp_path):
    target, tensors = target_model(), eagle3_tensors({}, layers=3, head_norms=True, every=1)
    wide = {
        f"layers.{index}.self_attn.{name}_proj.weight": (rows, 2 * HIDDEN)
        for index in (1, 2)
        for name, rows in (("q", HEADS * SIZE), ("k", GROUPS * SIZE), ("v", GROUPS * SIZE))
    }
    tensors |= random_tensors(wide | {f"layers.{index}.hidden_norm.weight": (HIDDEN,) for index in (1, 2)}, seed=8)
    config = layer_keys(architectures=["Qwen3Eagle3Model"], target_layer_ids=[layer - 1 for layer in READ])
    drafter = loaded(write_checkpoint(tmp_path, config, tensors), target, "EAGLE-3")
    features, embedded = hidden_states(target, READ), target.model.embed_tokens.weight
    reference = Eagle3Reference(tensors, layer_keys(), {}, 3)
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        expected = torch.stack(reference.drafts(features[:end], embedded[torch.tensor(drafted)], 3))
        assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_parts_without_effect_are_left_out(tmp_path, monkeypatch, head_norms, biased):
    """A first layer that reads its own position and has an MLP of zeros, and equal heads of keys and values."""
    target, tensors = target_model(), eagle3_tensors({}, layers=3, head_norms=head_norms)
    tensors["layers.0.mlp.down_proj.weight"].zero_()
    for name in ("k_proj", "v_proj"):
        tensors[f"layers.1.self_attn.{name}.weight"][SIZE:] = tensors[f"layers.1.self_attn.{name}.weight"][:SIZE]
    if biased:
        for index, (name, size) in product(range(3), [("v_proj", GROUPS * SIZE), ("o_proj", HIDDEN)]):
            tensors[f"layers.{index}.self_attn.{name}.bias"] = torch.randn(size)
    keys = layer_keys(layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=1)
    folder = write_checkpoint(tmp_path, speculators_config({}, transformer_layer_config=keys), tensors)
    features, found = hidden_states(target, READ), []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(eagle3, "leave_out_idle_parts", lambda drafter: None)
        drafter = loaded(folder, target, "EAGLE-3")
        assert isinstance(drafter.layers[0].self_attn, eagle3.OwnPosition) is not (whole or biased)
        assert drafter.layers[1].self_attn.k_proj.out_features == (GROUPS if whole or biased else 1) * SIZE
        found.append(torch.cat([logits for _, _, logits in draft_rounds(drafter, features, 3)]))
    assert torch.allclose(*found, atol=1e-4) and found[0].isfinite().any()


@pytest.mark.parametrize(
    ("keys", "offered"), [({"norm_output": False}, True), ({"norm_output": True}, False), ({}, False)]
)
def test_heads_that_specforge_trained_without_the_final_norm_have_a_reading(tmp_path, keys, offered):
    target, tensors = target_model(), eagle3_tensors({})
    config = layer_keys(eagle_aux_hidden_state_layer_ids=list(READ)) | keys
    drafter = loaded(write_checkpoint(tmp_path, config, tensors), target, "EAGLE-3")
    found = [each for each in other_readings(drafter).values() if not each.norm_before_head]
    assert drafter.conventions.norm_before_head and len(found) == offered
    if not found:
        return
    drafter.conventions = found[0]
    assert any(each.norm_before_head for each in other_readings(drafter).values())
    features, embedded = hidden_states(target, READ), target.model.embed_tokens.weight
    reference = Eagle3Reference(tensors, layer_keys(), {"no_head_norm": True}, 1)
    chosen = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        expected = torch.stack(reference.drafts(features[:end], embedded[torch.tensor(drafted)], 3))
        assert torch.allclose(logits[:, chosen], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("head_norms", [False, True])
def test_sliding_layers_attend_to_the_last_positions_only(tmp_path, head_norms):
    target, tensors = target_model(), eagle3_tensors({}, layers=2, head_norms=head_norms)
    keys = layer_keys(layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=3)
    folder = write_checkpoint(tmp_path, keys | {"eagle_aux_hidden_state_layer_ids": list(READ)}, tensors)
    drafter, features = loaded(folder, target, "EAGLE-3"), hidden_states(target, READ)
    chosen, embedded = tensors["d2t"] + torch.arange(len(tensors["d2t"])), target.model.embed_tokens.weight
    reference = Eagle3Reference(tensors, keys, {}, 2)
    for end, drafted, logits in draft_rounds(drafter, features, 4):
        expected = torch.stack(reference.drafts(features[:end], embedded[torch.tensor(drafted)], 4))
        assert torch.allclose(logits[:, chosen], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 300.0},
        {"rope_theta": 300.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [2, 3, 3]}},
        {"rope_parameters": {"full_attention": {"rope_theta": 9.0}, "sliding_attention": {"rope_theta": 300.0}}},
    ],
)
def test_rotary_parameters_of_other_targets_are_read(tmp_path, rope):
    target, tensors = target_model(), eagle3_tensors({})
    keys = {name: value for name, value in layer_keys().items() if name != "rope_theta"} | rope
    folder = write_checkpoint(tmp_path, keys | {"eagle_aux_hidden_state_layer_ids": list(READ)}, tensors)
    drafter, features = loaded(folder, target, "EAGLE-3"), hidden_states(target, READ)
    chosen, embedded = tensors["d2t"] + torch.arange(len(tensors["d2t"])), target.model.embed_tokens.weight
    reference = Eagle3Reference(tensors, layer_keys(rope_theta=300.0), {}, 1)
    for end, drafted, logits in draft_rounds(drafter, features, 2):
        expected = torch.stack(reference.drafts(features[:end], embedded[torch.tensor(drafted)], 2))
        assert torch.allclose(logits[:, chosen], expected, atol=2e-4, rtol=1e-4)


def test_biases_are_those_of_the_tensors(tmp_path):
    target, tensors = target_model(), eagle3_tensors({})
    names = ("fc", *(f"layers.0.self_attn.{part}_proj" for part in "qkv"), "layers.0.mlp.up_proj")
    biases = {f"{name}.bias": (len(tensors[f"{name}.weight"]),) for name in names}
    tensors |= random_tensors(biases, seed=5)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # as in old exports
    folder = write_checkpoint(tmp_path, speculators_config({"attention_bias": True}), tensors)
    weights = loaded(folder, target, "EAGLE-3").state_dict()
    assert {name for name in weights if name.endswith("bias")} == set(biases)
    assert all(torch.equal(weights[name], tensors[name]) for name in biases)


@pytest.mark.parametrize(
    ("config", "read"),
    [
        ({}, (2, LAYERS // 2, LAYERS - 3)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS]}, (2, 4, LAYERS + 1)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({"target_layer_ids": [1, 2, 4]}, (2, 3, 5)),
        # At the top level they are hidden states, whatever is repeated below it.
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            },
            (1, 3, 5),
        ),
    ],
)
def test_layer_ids_are_read_as_their_programs_write_them(tmp_path, config, read):
    target = target_model()
    folder = write_checkpoint(tmp_path, layer_keys() | config, eagle3_tensors({}))
    assert loaded(folder, target, "EAGLE-3").feature_layers == read


@pytest.mark.parametrize(("program", "expected"), [({"speculators_model_type": "eagle3"}, True), ({}, False)])
def test_a_residual_that_the_config_does_not_name_is_the_one_of_the_program(tmp_path, program, expected):
    """As vLLM reads files of speculators, and as SafeAILab and SpecForge train."""
    folder = write_checkpoint(tmp_path, layer_keys() | program, eagle3_tensors({}))
    assert loaded(folder, target_model(), "EAGLE-3").conventions.norm_before_residual is expected


@pytest.mark.parametrize("layers", [(1, 3, 5), (2, 4, LAYERS + 1), (0, LAYERS, -1)])
@pytest.mark.parametrize("cache", [True, False])
def test_sessions_keep_the_numbered_hidden_states(layers, cache):
    target = target_model()
    session = ModelSession(target, features=layers, use_cache=cache)
    session.begin(TOKENS)
    session.feed(TOKENS, keep=1)
    raw = hidden_states(target, tuple(range(LAYERS + 1))).chunk(LAYERS + 1, dim=-1)  # the last one before the norm
    normed = target.model.norm(raw[LAYERS])
    expected = [normed if layer in (-1, LAYERS) else raw[min(layer, LAYERS)] for layer in layers]
    assert torch.allclose(session.take_features(), torch.cat(expected, dim=-1), atol=1e-5)


def renamed(tensors: Any, layout: str) -> Any:
    """The same weights in another layout."""
    if layout == "safeailab":
        return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if layout == "nemo":
        return {f"model.{name}": tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return tensors


@pytest.mark.parametrize("layout", ["safeailab", "nemo"])
def test_layouts_give_the_same_drafter(tmp_path, layout):
    target, tensors = target_model(), eagle3_tensors({}, every=1)
    config = speculators_config({}, eagle_aux_hidden_state_layer_ids=list(READ))
    first = loaded(write_checkpoint(tmp_path / "a", config, tensors), target, "EAGLE-3")
    flat = layer_keys(eagle_aux_hidden_state_layer_ids=list(READ), draft_vocab_size=VOCABULARY)
    second = loaded(write_checkpoint(tmp_path / "b", flat, renamed(tensors, layout)), target, "EAGLE-3")
    assert first.conventions == second.conventions
    weights = second.state_dict()
    assert all(torch.equal(part, weights[name]) for name, part in first.state_dict().items())


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_text_is_the_targets_own(tmp_path, rule):
    """A drafter of a tiny vocabulary is often right, and often wrong."""
    target = target_model(vocab_size=8)
    tensors = eagle3_tensors({"norm_output": True}, every=1)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:8].clone()
    config = speculators_config({"norm_output": True}, eagle_aux_hidden_state_layer_ids=[1, 3, LAYERS])
    drafter = loaded(write_checkpoint(tmp_path, config, tensors), target, "EAGLE-3")
    check_texts(target, drafter, rule)


def test_a_folder_is_loaded_as_the_drafter_of_a_pair(tmp_path):
    save_folder(tmp_path / "target", target_model(vocab_size=300), tiny_tokenizer())
    tensors = eagle3_tensors({}, every=1)
    tensors["lm_head.weight"] = torch.randn(300, HIDDEN)
    folder = write_checkpoint(tmp_path / "drafter", speculators_config({}), tensors)
    pair = load(tmp_path / "target", folder)
    assert pair.drafter_kind == "EAGLE-3" and "EAGLE-3" in str(pair.drafter_name)
    assert pair.feature_layers == (2, LAYERS // 2, LAYERS - 3)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The folder of a target. Tests do not change it."""
    return save_folder(
        tmp_path_factory.mktemp("target") / "target", target_model(vocab_size=VOCABULARY), tiny_tokenizer()
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors, config: tensors.pop("layers.0.mlp.up_proj.weight"), "up_proj"),
        (lambda tensors, config: tensors.update({"d2t": tensors["d2t"] + 1000}), "vocabulary"),
        # As if d2t held differences of neighbours, or something else: two draft ids mean one token.
        (lambda tensors, config: tensors["d2t"][1:].sub_(1 + tensors["d2t"][1] - tensors["d2t"][0]), "twice"),
        (lambda tensors, config: tensors["norm.weight"].fill_(float("nan")), "finite"),
        (lambda tensors, config: config.update({"fc_norm": True}), "fc_norm.0.weight is missing"),
        (lambda tensors, config: config.update({"norm_before_fc": True}), "input_norm.weight is missing"),
        (lambda tensors, config: tensors.update({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}), "numbers per token"),
        (lambda tensors, config: config.update({"eagle_aux_hidden_state_layer_ids": [1, 2, 99]}), "99"),
        (lambda tensors, config: tensors.update({"embed_tokens.weight": torch.zeros(20, HIDDEN)}), "embedding"),
        (lambda tensors, config: config["transformer_layer_config"].update({"intermediate_size": 40}), "proj"),
        (lambda tensors, config: config["transformer_layer_config"].update({"layer_types": ["linear"]}), "layer_types"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(target_folder, tmp_path, change, word):
    tensors, config = eagle3_tensors({}), copy.deepcopy(speculators_config({}))
    change(tensors, config)
    assert word in refusal(target_folder, write_checkpoint(tmp_path / "drafter", config, tensors))


@pytest.mark.parametrize("has_copy", [True, False])
def test_an_embedding_is_shared_without_the_targets_scaling(tmp_path, has_copy):
    """Gemma multiplies its embeddings outside of the weights, and drafters are trained on the weights alone."""
    config = Gemma3TextConfig(**DECODER | {"num_hidden_layers": LAYERS, "head_dim": 8})
    target = build(Gemma3ForCausalLM, config, 0)
    tensors, shared = eagle3_tensors({}), target.get_input_embeddings()
    if has_copy:
        tensors["embed_tokens.weight"] = shared.weight.detach().clone()
    drafter = loaded(write_checkpoint(tmp_path, speculators_config({}), tensors), target, "EAGLE-3")
    ids = torch.tensor([3, 5])
    assert torch.equal(drafter.embed_tokens(ids), shared.weight[ids]) and not torch.equal(
        shared(ids), shared.weight[ids]
    )
    assert drafter.embed_tokens.weight.data_ptr() == shared.weight.data_ptr()
