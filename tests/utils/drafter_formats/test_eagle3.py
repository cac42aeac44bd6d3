"""EAGLE-3 drafters in every layout compute what the equations say, read the right hidden states, and change no text."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_checkpoints import HIDDEN, draft_vocabulary, layer_keys, layer_shapes, random_tensors, write_checkpoint
from eagle3_reference import Eagle3Reference
from samplers import PROCESSORS
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer
from toys import decoding

from sampling import RULES, HeadDrafter, HeadSession, autoregressive_steps, speculative_steps
from utils.decode.model_session import ModelSession
from utils.drafter_formats.checkpoint import read_checkpoint
from utils.drafter_formats.eagle3 import Eagle3, load_eagle3
from utils.drafter_formats.formats import format_of
from utils.metrics.results import tokens_of
from utils.models.sources import locate

VOCABULARY, LAYERS, READ = 64, 6, (2, 3, 4)
TOKENS = [7, 11, 2, 29, 31, 5, 17, 40, 8, 1]
FLAGS = (
    {},
    {"norm_before_residual": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
)


def target_model(**overrides: Any) -> Any:
    return tiny_llama(num_hidden_layers=LAYERS, **overrides)


def tensors_of(flags: dict[str, Any], *, layers: int = 1, head_norms: bool = False, every: int = 2) -> Any:
    """Weights in the speculators layout. every: the draft vocabulary has one of so many tokens."""
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "layers.0.hidden_norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCABULARY // every, HIDDEN)
    for index in range(layers):
        entrance = HIDDEN if index else 2 * HIDDEN
        shapes |= layer_shapes(f"layers.{index}.", entrance=entrance, head_norms=head_norms)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    tensors = random_tensors(shapes, seed=1)
    return tensors | (draft_vocabulary(VOCABULARY, every, seed=2) if every > 1 else {})


def speculators_config(flags: dict[str, Any], **others: Any) -> dict[str, Any]:
    keys = layer_keys(vocab_size=VOCABULARY, model_type="llama")
    flags = {"norm_before_residual": False} | flags
    return {"speculators_model_type": "eagle3", "transformer_layer_config": keys} | flags | others


def built(folder: Path, target: Any) -> Eagle3:
    checkpoint = read_checkpoint(locate(str(folder), print))
    assert checkpoint is not None
    row = format_of(checkpoint)
    assert row is not None and row.name == "EAGLE-3"
    return load_eagle3(checkpoint, target)


def hidden_states(target: Any, layers: tuple[int, ...]) -> torch.Tensor:
    """Features (T, F) of TOKENS, read off one forward pass by hooks on the layers themselves."""
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, index=index: seen.setdefault(index, inputs[0]))
        for index, layer in enumerate((*target.model.layers, target.model.norm))
    ]
    with torch.no_grad():
        target(torch.tensor([TOKENS]))
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[layer][0] for layer in layers], dim=-1)


@pytest.mark.parametrize(
    ("flags", "layers", "head_norms"), [*product(FLAGS, [1, 2], [False]), *product(FLAGS, [1], [True])]
)
def test_drafts_are_those_of_the_equations(tmp_path, flags, layers, head_norms):
    """Over rounds of different lengths: the entries of rejected drafts must be dropped and computed anew."""
    target, tensors = target_model(), tensors_of(flags, layers=layers, head_norms=head_norms)
    config = speculators_config(flags, eagle_aux_hidden_state_layer_ids=list(READ))
    drafter = built(write_checkpoint(tmp_path, config, tensors), target)
    features, embedded = hidden_states(target, READ), target.model.embed_tokens.weight
    reference = Eagle3Reference(tensors, layer_keys(), flags, layers)
    chosen = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    session = HeadSession(drafter)
    session.begin(TOKENS[:4])
    known = 0
    for end in (3, 4, 7):  # features of so many positions have arrived
        session.rewind(end)
        session.add_features(features[known:end], known, end)
        known = end
        drafted = TOKENS[1:end] + [TOKENS[end], 50, 9]
        expected = reference.drafts(features[:end], embedded[torch.tensor(drafted)], 3)
        for step in range(3):
            logits = session.feed(TOKENS[: end + 1] + [50, 9][:step], keep=1)
            assert torch.allclose(logits[0, chosen], expected[step], atol=2e-4, rtol=1e-4)
            others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill_(0, chosen, False)
            assert torch.isneginf(logits[0, others]).all()
        session.rewind(end)


@pytest.mark.parametrize(
    ("config", "read"),
    [
        ({}, (2, LAYERS // 2, LAYERS - 3)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS]}, (2, 4, LAYERS + 1)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({"target_layer_ids": [1, 2, 4]}, (2, 3, 5)),
    ],
)
def test_layer_ids_are_read_as_their_programs_write_them(tmp_path, config, read):
    target = target_model()
    folder = write_checkpoint(tmp_path, layer_keys() | config, tensors_of({}))
    assert built(folder, target).feature_layers == read


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
    target, tensors = target_model(), tensors_of({}, every=1)
    config = speculators_config({}, eagle_aux_hidden_state_layer_ids=list(READ))
    first = built(write_checkpoint(tmp_path / "a", config, tensors), target)
    flat = layer_keys(eagle_aux_hidden_state_layer_ids=list(READ), draft_vocab_size=VOCABULARY)
    second = built(write_checkpoint(tmp_path / "b", flat, renamed(tensors, layout)), target)
    assert first.conventions == second.conventions
    weights = second.state_dict()
    assert all(torch.equal(part, weights[name]) for name, part in first.state_dict().items())


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_text_is_the_targets_own(tmp_path, rule):
    """A drafter of a tiny vocabulary is often right, and often wrong."""
    target = target_model(vocab_size=8)
    tensors = tensors_of({"norm_output": True}, every=1)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:8].clone()
    config = speculators_config({"norm_output": True}, eagle_aux_hidden_state_layer_ids=[1, 3, LAYERS])
    drafter = built(write_checkpoint(tmp_path, config, tensors), target)
    plan, accepted = decoding(12, processor=PROCESSORS[rule == "coupled"], seed=3), set()
    for prompt in ([first, second] for first in range(8) for second in (2, 5)):
        expected = tokens_of(autoregressive_steps(prompt, ModelSession(target, rewinds=False), plan))
        session = ModelSession(target, features=drafter.feature_layers)
        shares = RULES[rule].shares_noise
        head = HeadDrafter(HeadSession(drafter), plan, session.vocab_size, shares_noise=shares)
        steps = list(speculative_steps(prompt, head, session, plan, gamma=4, rule=RULES[rule]))
        assert tokens_of(steps) == expected
        accepted |= {step.accepted for step in steps}
    assert accepted >= {0, 1}


def test_a_folder_is_loaded_as_the_drafter_of_a_pair(tmp_path):
    save_folder(tmp_path / "target", target_model(vocab_size=300), tiny_tokenizer())
    tensors = tensors_of({}, every=1)
    tensors["lm_head.weight"] = torch.randn(300, HIDDEN)
    folder = write_checkpoint(tmp_path / "drafter", speculators_config({}), tensors)
    pair = load(tmp_path / "target", folder)
    assert pair.drafter_kind == "head" and "EAGLE-3" in str(pair.drafter_name)
    assert pair.feature_layers == (2, LAYERS // 2, LAYERS - 3)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors, config: tensors.pop("layers.0.mlp.up_proj.weight"), "up_proj"),
        (lambda tensors, config: tensors.update({"d2t": tensors["d2t"] + 1000}), "vocabulary"),
        (lambda tensors, config: tensors["norm.weight"].fill_(float("nan")), "finite"),
        (lambda tensors, config: tensors.update({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}), "numbers per token"),
        (lambda tensors, config: config.update({"eagle_aux_hidden_state_layer_ids": [1, 2, 99]}), "99"),
        (lambda tensors, config: tensors.update({"embed_tokens.weight": torch.zeros(20, HIDDEN)}), "embedding"),
        (lambda tensors, config: config["transformer_layer_config"].update({"intermediate_size": 40}), "proj"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(tmp_path, change, word):
    save_folder(tmp_path / "target", target_model(vocab_size=VOCABULARY), tiny_tokenizer())
    tensors, config = tensors_of({}), copy.deepcopy(speculators_config({}))
    change(tensors, config)
    assert word in refusal(tmp_path / "target", write_checkpoint(tmp_path / "drafter", config, tensors))
