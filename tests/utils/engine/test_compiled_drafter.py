"""A drafter in machine code or in graphs drafts what its modules draft, and is used with its engine alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_checkpoints import (
    GROUPS,
    HIDDEN,
    SIZE,
    eagle3_tensors,
    layer_keys,
    speculators_config,
    write_checkpoint,
)
from drafter_runs import TOKENS, check_texts, draft_rounds, hidden_states, loaded, round_weights
from graphs_on_cpu import OnCpu
from tiny import tiny_head, tiny_llama

from sampling.drafters.feature_sessions import HeadSession
from utils.decode.engine_forward import MAX_WIDTH, prepare_run
from utils.drafter_formats.eagle3 import Eagle3
from utils.engine import Engine, graph_cache
from utils.engine.compiled_drafter import CompiledDrafter
from utils.engine.engine import LAYER_ENGINES
from utils.engine.graph_drafter import MOST, GraphDrafter
from utils.engine.selftest import drafts_like_modules

READ = (0, 1, 2)  # of a target of two layers
ENGINES: dict[str, type] = {"invariant": CompiledDrafter, "cuda_graph": GraphDrafter}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
# Flags of the config, keys of its layers, their number, whether heads have norms, and whether there are biases.
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool, bool]] = {
    "one layer": ({"fc_norm": True}, {}, 1, False, False),
    "residual after the norm": ({"norm_before_residual": True}, {}, 1, False, False),
    "fed back after the norm": ({"norm_output": True}, {}, 1, False, False),
    "two layers, head norms, gelu": ({}, {"hidden_act": "gelu"} | SLIDING, 2, True, False),
    "biases": ({}, SLIDING, 2, False, True),
    "a window of one position": ({}, dict(MIXED), 2, False, False),
    "a layer that mixes": ({"norm_before_residual": True}, MIXED, 2, False, False),
}


def drafter_of(folder: Path, target: Any, name: str) -> Eagle3:
    flags, keys, layers, head_norms, biased = DRAFTERS[name]
    tensors = eagle3_tensors(flags, layers=layers, head_norms=head_norms)
    if keys is MIXED:
        tensors["layers.0.mlp.down_proj.weight"].zero_()
    if biased:
        sizes = {"self_attn.q_proj": 4 * SIZE, "self_attn.k_proj": GROUPS * SIZE, "mlp.down_proj": HIDDEN}
        tensors |= {
            f"layers.{layer}.{part}.bias": torch.randn(size) for layer in (0, 1) for part, size in sizes.items()
        }
    config = speculators_config(
        flags, transformer_layer_config=layer_keys(**keys), eagle_aux_hidden_state_layer_ids=list(READ)
    )
    drafter: Eagle3 = loaded(write_checkpoint(folder, config, tensors), target, "EAGLE-3")
    return drafter


@pytest.fixture(autouse=True)
def _graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_ENGINES, "cuda_graph", OnCpu)


@pytest.mark.parametrize("kind", ENGINES)
def test_drafts_are_those_of_the_modules(tmp_path: Path, kind: str) -> None:
    target = tiny_llama()
    drafters, features = [drafter_of(tmp_path / name, target, name) for name in DRAFTERS], hidden_states(target, READ)
    engine = Engine([target])
    engine.use(kind, 1)
    for name, drafter in zip(DRAFTERS, drafters, strict=True):
        before = {name: part.clone() for name, part in drafter.state_dict().items()}
        if kind == "invariant":
            round_weights(drafter)
        plain = torch.cat([logits for _, _, logits in draft_rounds(drafter, features, 4)])
        drafter.load_state_dict(before)
        engine.add_helper(drafter)
        assert isinstance(drafter.compiled, ENGINES[kind]), name
        compiled = torch.cat([logits for _, _, logits in draft_rounds(drafter, features, 4)])
        assert torch.equal(plain.argmax(-1), compiled.argmax(-1)), name
        assert torch.equal(plain.isneginf(), compiled.isneginf()), name
        assert torch.allclose(plain, compiled, atol=2e-3, rtol=1e-3), name  # inputs may be rounded to 16 bits
    engine.use("plain", 1)
    assert not any(drafter.compiled for drafter in drafters)


def test_rows_at_once_are_rows_one_by_one(tmp_path: Path) -> None:
    """Whatever the number of rows and threads, an entry has the same bits."""
    target = tiny_llama()
    drafter, features = drafter_of(tmp_path, target, "a layer that mixes"), hidden_states(target, READ)
    engine, found = Engine([target], helpers=[drafter]), []
    for threads, step in ((1, 1), (2, 3), (2, 9)):
        engine.use("invariant", threads)
        session = HeadSession(drafter)
        session.begin(TOKENS[:1])
        for end in range(step, 10, step):
            session.add_features(features[end - step : end], end - step, end)
            logits = session.feed(TOKENS[: end + 1], keep=1)
        found.append(logits)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_a_text_is_read_for_its_last_state_alone(tmp_path: Path, name: str) -> None:
    """Only keys and values of the earlier entries are computed in the last layer. Later drafts are the same."""
    target = tiny_llama()
    drafter, length = drafter_of(tmp_path, target, name), MAX_WIDTH + 10
    tokens, features = torch.arange(length) % 50, torch.randn(length, 3 * target.config.hidden_size)
    states, rows = drafter.fuse_features(features), torch.arange(length)[None]
    cache, full = drafter.new_cache(), drafter.new_cache()
    state, logits = drafter.add_entries(states, tokens, 0, cache)
    expected = drafter.next_states(states[None], tokens[None], rows, full)[0, -1:]
    for step in range(3):
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits, drafter.logits(expected), atol=1e-4, rtol=1e-4)
        token, at = torch.tensor([step + 7]), length + step
        state, logits = drafter.add_entries(drafter.feedback(state), token, at, cache)
        place = torch.tensor([[at]])
        expected = drafter.next_states(drafter.feedback(expected)[None], token[None], place, full)[0, -1:]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_program_that_differs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    target = tiny_llama()
    drafter = drafter_of(tmp_path, target, "one layer")
    add_entries = ENGINES[kind].__call__

    def wrong(self: Any, *arguments: Any) -> Any:
        state, logits = add_entries(self, *arguments)
        return state, logits + 0.1 * logits.roll(1)

    monkeypatch.setattr(ENGINES[kind], "__call__", wrong)
    Engine([target], helpers=[drafter]).use(kind, 1)
    assert drafter.compiled is None


def test_what_no_program_computes_runs_in_modules(tmp_path: Path) -> None:
    """Frequencies that depend on the length."""
    target = tiny_llama(num_hidden_layers=6)
    keys = layer_keys(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    config = speculators_config({}, transformer_layer_config=keys)
    drafter = loaded(write_checkpoint(tmp_path, config, eagle3_tensors({})), target, "EAGLE-3")
    assert drafter.draft_spec() is None
    Engine([target], helpers=[drafter]).use("invariant", 1)
    assert drafter.compiled is None


def test_replays_need_nothing_new_in_a_prepared_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where entries move to a longer slot, behind a text that modules have read, and in inference mode."""
    monkeypatch.setattr(graph_cache, "SMALLEST", 32)
    target = tiny_llama()
    drafter, length = drafter_of(tmp_path, target, "two layers, head norms, gelu"), MAX_WIDTH + 80
    tokens, features = [place % 50 for place in range(length + 1)], torch.randn(length, 3 * target.config.hidden_size)

    def logits() -> list[torch.Tensor]:
        session, found, known = HeadSession(drafter), [], 0
        session.begin(tokens[:1])
        for end in (20, 20 + MAX_WIDTH + 5, 90, 95, 107, length - MOST, length):
            session.rewind(end)
            session.add_features(features[known:end], known, end)
            known = end
            found += [session.feed([*tokens[: end + 1], 7, 8][: end + 1 + draft], keep=1) for draft in range(2)]
        return found

    plain = logits()
    engine = Engine([target], helpers=[drafter])
    engine.use("cuda_graph", 1)
    assert isinstance(drafter.compiled, GraphDrafter)
    drafter.fuse_features(features[:1])  # as in a run that warms up
    prepare_run((target, drafter), 20, length)
    graphs = drafter.compiled._record.graphs
    count = len(graphs)
    with torch.inference_mode():
        first = logits()
    for found in (first, logits()):
        assert all(torch.allclose(*pair, atol=1e-4, rtol=1e-4) for pair in zip(found, plain, strict=True))
    assert len(graphs) == count and sum(graph.replays for graph in graphs) > 20
    engine.use("plain", 1)
    assert drafter.compiled is None


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_texts_are_those_of_the_target_with_graphs(rule: str) -> None:
    target = tiny_llama(vocab_size=8)
    drafter: Any = tiny_head(target)
    Engine([target], helpers=[drafter]).use("cuda_graph", 1)
    assert isinstance(drafter.compiled, GraphDrafter)
    check_texts(target, drafter, rule)


def test_a_change_of_conventions_is_recorded_anew(tmp_path: Path) -> None:
    target = tiny_llama()
    drafter = drafter_of(tmp_path, target, "one layer")
    Engine([target], helpers=[drafter]).use("cuda_graph", 1)
    for changed in ({"norm_before_residual": True}, {"norm_before_head": False}, {}):
        conventions = replace(drafter.conventions, norm_before_residual=False, norm_before_head=True)
        drafter.conventions = replace(conventions, **changed)
        compiled, drafter.compiled = drafter.compiled, None
        assert compiled is not None and drafts_like_modules(compiled, drafter)
        drafter.compiled = compiled


def test_states_and_logits_stay_as_they_are_when_a_graph_is_replayed(tmp_path: Path) -> None:
    target = tiny_llama()
    drafter = drafter_of(tmp_path, target, "one layer")
    Engine([target], helpers=[drafter]).use("cuda_graph", 1)
    compiled, tokens = drafter.compiled, torch.tensor([5])
    assert compiled is not None
    state = torch.randn(1, HIDDEN)
    with torch.inference_mode():
        _, cache = [compiled.new_cache() for _ in range(2)]  # the second one has a new slot
        compiled(state, tokens, 0, cache)
        cache.crop(-1)
    found = [compiled(state, tokens, place, cache) for place in range(2)]
    copies = [[part.clone() for part in pair] for pair in found]
    compiled(2 * state, tokens + 1, 2, cache)
    for count in (1, 3, MOST, MOST + 1):
        features = torch.randn(count, 3 * target.config.hidden_size)
        fused, expected = drafter.fuse_features(features), drafter._fused(features)
        drafter.fuse_features(2 * features + 1)
        torch.testing.assert_close(fused, expected)
    assert all(torch.equal(*parts) for pairs in zip(found, copies, strict=True) for parts in zip(*pairs, strict=True))
    assert not torch.equal(found[0][1], found[1][1])
