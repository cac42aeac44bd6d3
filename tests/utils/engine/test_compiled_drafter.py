"""A drafter in machine code drafts what its modules draft, and is used with the compiled engine alone."""

from __future__ import annotations

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
from drafter_runs import TOKENS, draft_rounds, hidden_states, loaded, round_weights
from tiny import tiny_llama

from sampling.drafters.feature_sessions import HeadSession
from utils.decode.engine_forward import MAX_WIDTH
from utils.drafter_formats.eagle3 import Eagle3
from utils.engine import Engine
from utils.engine.compiled_drafter import CompiledDrafter

READ = (2, 3, 4)
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
# Flags of the config, keys of its layers, their number, whether heads have norms, and whether there are biases.
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool, bool]] = {
    "one layer": ({"fc_norm": True}, {}, 1, False, False),
    "residual after the norm": ({"norm_before_residual": True}, {}, 1, False, False),
    "fed back after the norm": ({"norm_output": True}, {}, 1, False, False),
    "two layers, head norms, gelu": ({}, {"hidden_act": "gelu"} | SLIDING, 2, True, False),
    "biases": ({}, SLIDING, 2, False, True),
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


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_the_modules(tmp_path: Path, name: str) -> None:
    target = tiny_llama(num_hidden_layers=6)
    drafter, features = drafter_of(tmp_path, target, name), hidden_states(target, READ)
    before = {name: part.clone() for name, part in drafter.state_dict().items()}
    round_weights(drafter)
    plain = torch.cat([logits for _, _, logits in draft_rounds(drafter, features, 4)])
    drafter.load_state_dict(before)
    engine = Engine([target], helpers=[drafter])
    engine.use("invariant", 1)
    assert isinstance(drafter.compiled, CompiledDrafter) and drafter.compiled.agrees()
    compiled = torch.cat([logits for _, _, logits in draft_rounds(drafter, features, 4)])
    assert torch.equal(plain.argmax(-1), compiled.argmax(-1))
    assert torch.equal(plain.isneginf(), compiled.isneginf())
    assert torch.allclose(plain, compiled, atol=1e-4, rtol=1e-4)
    engine.use("plain", 1)
    assert drafter.compiled is None


def test_rows_at_once_are_rows_one_by_one(tmp_path: Path) -> None:
    """Whatever the number of rows and threads, an entry has the same bits."""
    target = tiny_llama(num_hidden_layers=6)
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
    target = tiny_llama(num_hidden_layers=6)
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


def test_a_program_that_differs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_llama(num_hidden_layers=6)
    drafter = drafter_of(tmp_path, target, "one layer")
    add_entries = CompiledDrafter.__call__

    def wrong(self: CompiledDrafter, *arguments: Any) -> Any:
        state, logits = add_entries(self, *arguments)
        return state, logits + 0.1 * logits.roll(1)

    monkeypatch.setattr(CompiledDrafter, "__call__", wrong)
    Engine([target], helpers=[drafter]).use("invariant", 1)
    assert drafter.compiled is None


def test_what_no_program_computes_runs_in_modules(tmp_path: Path) -> None:
    """Frequencies that depend on the length, and a mixing layer with an MLP."""
    target = tiny_llama(num_hidden_layers=6)
    for number, change in enumerate(
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            {"layer_types": ["sliding_attention"], "sliding_window": 1},
        )
    ):
        config = speculators_config({}, transformer_layer_config=layer_keys(**change))
        drafter = loaded(write_checkpoint(tmp_path / str(number), config, eagle3_tensors({})), target, "EAGLE-3")
        assert drafter.draft_spec() is None
        Engine([target], helpers=[drafter]).use("invariant", 1)
        assert drafter.compiled is None
