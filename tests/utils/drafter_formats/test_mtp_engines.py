"""MTP layers under engines that replace the target's layers: the text stays the target's own."""

from __future__ import annotations

from typing import Any

import pytest
from drafter_runs import check_texts, read
from mtp_checkpoints import qwen_layers, tiny_qwen3, write_target

from utils.drafter_formats.mtp import load_mtp, mtp_layers
from utils.engine import Engine


@pytest.mark.parametrize("rule", ["coupled", pytest.param("rejection", marks=pytest.mark.full)])  # drawn, and greedy
def test_the_text_is_the_targets_own_under_an_engine(tmp_path: Any, rule: str) -> None:
    """A dense target: the engine computes neither experts nor recurrent layers."""
    target = tiny_qwen3(vocab_size=8)
    drafter = load_mtp(mtp_layers(read(write_target(tmp_path, target, qwen_layers(target)))), target)
    state = Engine([target], helpers=[drafter]).use("invariant", 1)
    assert (state.kind, state.verified) == ("invariant", True), state
    check_texts(target, drafter, rule)
