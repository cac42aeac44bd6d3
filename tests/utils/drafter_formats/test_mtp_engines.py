"""MTP layers under engines that replace the target's layers: the text stays the target's own."""

from __future__ import annotations

from typing import Any

import pytest
from drafter_runs import check_texts, read
from mtp_checkpoints import qwen_layers, tiny_qwen3, write_target

from utils.drafter_formats.mtp import load_mtp, mtp_layers
from utils.engine import Engine
from utils.engine.openvino_engine import unsupported


@pytest.mark.parametrize("rule", ["rejection", "coupled"])  # greedy, and drawn from the distribution
@pytest.mark.parametrize("engine", ["invariant", "openvino"])
def test_the_text_is_the_targets_own_under_an_engine(tmp_path: Any, engine: str, rule: str) -> None:
    """A dense target: OpenVINO computes neither experts nor recurrent layers, and the other engine's self-test refuses
    them.
    """
    if engine == "openvino" and (reason := unsupported("float32")):
        pytest.skip(reason)
    target = tiny_qwen3(vocab_size=8)
    drafter = load_mtp(mtp_layers(read(write_target(tmp_path, target, qwen_layers(target)))), target)
    state = Engine([target], helpers=[drafter]).use(engine, 1)
    assert (state.kind, state.verified) == (engine, True), state
    check_texts(target, drafter, rule)
