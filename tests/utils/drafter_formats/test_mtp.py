"""Drafting with MTP layers of the target's own files computes what the equations and transformers say."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from drafter_checkpoints import random_tensors
from drafter_runs import check_texts, draft_rounds, hidden_states, read
from mtp_checkpoints import (
    HIDDEN,
    LAYERS,
    QWEN,
    deepseek_layers,
    qwen_layers,
    separated,
    tiny_deepseek,
    tiny_glm,
    tiny_glm_lite,
    tiny_mellum,
    tiny_qwen,
    write_target,
)
from mtp_reference import QWEN as QWEN_NAMES
from mtp_reference import MtpReference
from shelf import load, refusal
from tiny import save_folder, tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from utils.drafter_formats.mtp import load_mtp, mtp_layers
from utils.models.feature_drafter import Conventions
from utils.pairs.doctor import examine, other_readings
from utils.pairs.load_pair import load_pair
from utils.pairs.request import PairRequest

TARGETS = {"glm": tiny_glm, "deepseek": tiny_deepseek, "mellum": tiny_mellum, "glm_lite": tiny_glm_lite}
KEYS = {"rms_norm_eps": 1e-5}
QWEN_KEYS = {"rope_theta": 5000.0, "partial_rotary_factor": 0.25}
PREFIX = f"model.layers.{LAYERS}."


def drafter_of(folder: Any, target: Any) -> Any:
    return load_mtp(mtp_layers(read(folder)), target)


def check_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().mean()
    assert torch.allclose(logits / scale, expected / scale, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fed_after", [True, False])
@pytest.mark.parametrize("read_after", [True, False])
def test_drafts_are_those_of_the_equations(tmp_path, read_after, fed_after):
    """For each reading, over rounds of different lengths whose drafts are rejected: their entries must be dropped and
    computed anew.
    """
    target = tiny_glm()
    layers = deepseek_layers(target)
    drafter = drafter_of(write_target(tmp_path, target, layers), target)
    own = drafter.conventions
    assert own == Conventions((LAYERS,), norm_output=True)
    chosen = Conventions((LAYERS if read_after else LAYERS + 1,), norm_output=fed_after)
    # Readings that differ from the present one in one respect are offered to the doctor.
    assert (chosen in other_readings(drafter).values()) == (read_after != fed_after)
    drafter.conventions = chosen
    features = hidden_states(target, (LAYERS,))
    features = target.model.norm(features).detach() if read_after else features
    keys = target.config.to_dict() | {"rope_theta": 5000.0}
    reference = MtpReference({name.removeprefix(PREFIX): part.detach() for name, part in layers.items()}, keys)
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        embedded = target.model.embed_tokens.weight[torch.tensor(drafted)].detach()
        states = reference.drafts(features[:end], embedded, 3, fed_after=fed_after)
        check_close(logits, states @ target.lm_head.weight.T)


@pytest.mark.parametrize("kind", QWEN)
def test_drafts_of_qwens_layers_are_those_of_the_equations(tmp_path, kind):
    """The norms add 1 to their weights, and the target's embedding and output head are used."""
    target = tiny_qwen(kind)
    layers = qwen_layers(target)
    drafter = drafter_of(write_target(tmp_path, target, layers), target)
    assert drafter.conventions == Conventions((LAYERS,), norm_output=True)
    features = target.model.norm(hidden_states(target, (LAYERS,))).detach()
    keys = target.config.to_dict() | QWEN_KEYS
    reference = MtpReference({name.removeprefix("mtp."): part for name, part in layers.items()}, keys, QWEN_NAMES)
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        embedded = target.model.embed_tokens.weight[torch.tensor(drafted)].detach()
        check_close(logits, reference.drafts(features[:end], embedded, 3) @ target.lm_head.weight.T)


def with_rules(names):
    """Every name with one rule in `make test`, in turn, and with the other one in `make test-full`."""
    for name, rules in zip(names, cycle([("coupled", "rejection"), ("rejection", "coupled")]), strict=False):
        yield (name, rules[0])
        yield pytest.param(name, rules[1], marks=pytest.mark.full)


@pytest.mark.parametrize(("kind", "rule"), [*with_rules(QWEN)])
def test_the_text_of_a_hybrid_target_is_its_own(tmp_path, kind, rule):
    """A rewind of its recurrent state computes accepted tokens again, and their features arrive twice."""
    target = tiny_qwen(kind, vocab_size=8)
    check_texts(target, drafter_of(write_target(tmp_path, target, qwen_layers(target)), target), rule)


@pytest.mark.parametrize("kind", ["qwen3_5", *(pytest.param(kind, marks=pytest.mark.full) for kind in [*QWEN][::2])])
def test_a_hybrid_target_and_its_mtp_layer_are_a_pair(tmp_path, kind):
    target = tiny_qwen(kind, vocab_size=300)
    pair = load(write_target(tmp_path, target, qwen_layers(target), tiny_tokenizer()), "mtp")
    assert pair.feature_layers == (LAYERS,) and "MTP" in str(pair.drafter_name)


def test_the_doctor_compares_all_readings(tmp_path):
    target = tiny_qwen("qwen3_5")
    drafter = drafter_of(write_target(tmp_path, target, qwen_layers(target)), target)
    text = torch.randint(64, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    found = examine(drafter, target, text, 2)
    read = {reading.conventions.feature_layers for reading in found.readings}
    assert read == {(LAYERS - 1,), (LAYERS,), (LAYERS + 1,)}
    assert {reading.conventions.norm_output for reading in found.readings} == {True, False}
    assert drafter.conventions == found.readings[0].conventions


def test_the_block_is_a_layer_of_the_target(tmp_path):
    """With the weights of the target's last layer, which runs as in the target: in one pass with a causal mask."""
    target = tiny_glm_lite()
    last = {f"{PREFIX}{name}": part for name, part in separated(target.model.layers[-1].state_dict()).items()}
    layers = deepseek_layers(target) | last
    drafter = drafter_of(write_target(tmp_path, target, layers), target)
    reference = MtpReference({name.removeprefix(PREFIX): part.detach() for name, part in layers.items()}, KEYS)
    reference.names = replace(reference.names, block=(lambda _, __, x, ___: layer_pass(target, x), ""))
    features = target.model.norm(hidden_states(target, (LAYERS,))).detach()
    for end, drafted, logits in draft_rounds(drafter, features, 3):
        embedded = target.model.embed_tokens.weight[torch.tensor(drafted)].detach()
        check_close(logits, reference.drafts(features[:end], embedded, 3) @ target.lm_head.weight.T)


@torch.no_grad()
def layer_pass(target: Any, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(x))[None]
    mask = torch.full((1, 1, len(x), len(x)), float("-inf")).triu(1)
    tables = target.model.rotary_emb(x[None], positions)
    return target.model.layers[-1](x[None], attention_mask=mask, position_embeddings=tables)[0]


@pytest.mark.parametrize("family", ["glm", "deepseek", "mellum"])
def test_drafts_are_those_of_transformers(tmp_path, monkeypatch, family):
    target = TARGETS[family]()
    write_target(tmp_path, target, qwen_layers(target) if family == "mellum" else deepseek_layers(target))
    monkeypatch.setattr(type(target), "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}\..*"])
    target = type(target).from_pretrained(tmp_path)
    oracle = MtpModel.from_pretrained(target).eval()
    features = target.model.norm(hidden_states(target, (LAYERS,))).detach()
    for end, drafted, logits in draft_rounds(drafter_of(tmp_path, target), features, 3):
        states, rows = features[None, :end], []
        for step in range(3):
            tokens, cache = torch.tensor([drafted[: end + step]]), MtpCache(config=target.config.get_mtp_config())
            positions = torch.arange(1, end + step + 1)[None]
            with torch.no_grad():
                result = oracle.forward_layer(0, states, positions, cache, input_ids=tokens)[:, -1:]
            rows.append(target.lm_head(result[0, 0]).detach())
            states = torch.cat([states, result], dim=1)
        check_close(logits, torch.stack(rows))


@pytest.mark.parametrize(("family", "rule"), [*with_rules(TARGETS)])
def test_the_text_is_the_targets_own(tmp_path, family, rule):
    target = TARGETS[family](vocab_size=8)
    layers = qwen_layers(target) if family == "mellum" else deepseek_layers(target)
    check_texts(target, drafter_of(write_target(tmp_path, target, layers), target), rule)


def test_parts_that_are_equal_to_the_targets_are_shared(tmp_path):
    target = tiny_glm()
    drafter = drafter_of(write_target(tmp_path, target, deepseek_layers(target)), target)
    assert drafter.embed_tokens.weight is target.model.embed_tokens.weight
    assert drafter.lm_head.rows.weight.data_ptr() == target.lm_head.weight.data_ptr()


def test_parts_of_its_own_are_used(tmp_path):
    target, own = tiny_glm(), random_tensors({"e": (64, HIDDEN), "h": (64, HIDDEN)}, seed=8)
    layers = deepseek_layers(target) | {
        f"{PREFIX}embed_tokens.weight": own["e"],
        f"{PREFIX}shared_head.head.weight": own["h"],
    }
    drafter = drafter_of(write_target(tmp_path, target, layers), target)
    assert torch.equal(drafter.embed_tokens.weight, own["e"]) and torch.equal(drafter.lm_head.rows.weight, own["h"])


def test_of_several_layers_the_first_drafts(tmp_path):
    target = tiny_glm()
    later = {name: part + 1 for name, part in deepseek_layers(target, number=10).items()}
    layers = deepseek_layers(target, number=9)
    drafter = drafter_of(write_target(tmp_path, target, later | layers), target)
    assert torch.equal(drafter.layer.eh_proj.weight, layers["model.layers.9.eh_proj.weight"])


def test_corrections_of_the_router_stay_in_float32(tmp_path):
    target = tiny_glm()
    folder = write_target(tmp_path, target, deepseek_layers(target))
    drafter = drafter_of(folder, target.bfloat16())
    assert drafter.layer.mtp_block.mlp.gate.e_score_correction_bias.dtype is torch.float32
    assert {part.dtype for part in drafter.parameters()} == {torch.bfloat16}


def test_mtp_is_a_drafter_of_a_pair(tmp_path):
    target = tiny_glm(vocab_size=300)
    folder = write_target(tmp_path, target, deepseek_layers(target, copies=False), tiny_tokenizer())
    pair = load(folder, "mtp")
    assert pair.drafter_kind == "MTP" and pair.feature_layers == (LAYERS,) and "MTP" in str(pair.drafter_name)


@pytest.mark.parametrize(("drafter", "reported"), [("mtp", False), (None, True)])
def test_weights_that_nothing_reads_are_reported_as_unused(tmp_path, drafter, reported):
    target, lines = tiny_glm(vocab_size=300), []
    layers = deepseek_layers(target, copies=False)
    folder = write_target(tmp_path, target, layers, tiny_tokenizer())
    load_pair(PairRequest(str(folder), drafter, device="cpu"), lines.append)
    assert lines and any("not used" in line for line in lines) == reported


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda layers: layers.pop(f"{PREFIX}mlp.experts.1.up_proj.weight"), "experts.1.up_proj"),
        (lambda layers: layers.update({f"{PREFIX}mlp.experts.3.down_proj.weight": torch.ones(2, 2)}), "down_proj"),
        (lambda layers: layers.pop(f"{PREFIX}hnorm.weight"), "hnorm"),
        (lambda layers: layers.update({f"{PREFIX}eh_proj.weight": torch.ones(HIDDEN, HIDDEN)}), "projection"),
        (lambda layers: layers.update({f"{PREFIX}eh_proj.weight_scale_inv": torch.ones(1)}), "quantized"),
        (lambda layers: layers[f"{PREFIX}hnorm.weight"].fill_(float("nan")), "finite"),
        (lambda layers: layers.clear(), "conversions"),
    ],
)
def test_layers_that_cannot_be_used_are_refused_in_one_sentence(tmp_path, change, word):
    target = tiny_glm(vocab_size=300)
    layers = deepseek_layers(target, copies=False)
    change(layers)
    assert word in refusal(write_target(tmp_path, target, layers, tiny_tokenizer()), "mtp")


def test_a_target_without_such_layers_is_refused(tmp_path):
    folder = save_folder(tmp_path, tiny_llama(vocab_size=300), tiny_tokenizer())
    assert "has no MTP layers" in refusal(folder, "mtp")


def test_a_gguf_target_is_refused_before_it_is_loaded(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=300), tiny_tokenizer())
    assert "GGUF" in refusal(path, "mtp")


def test_options_of_a_drafter_of_its_own_are_refused(tmp_path):
    target = tiny_glm(vocab_size=300)
    folder = write_target(tmp_path, target, deepseek_layers(target, copies=False), tiny_tokenizer())
    assert "--drafter-quantize" in refusal(folder, "mtp", drafter_quantize="int8")
