"""DFlash and DSpark drafters that the package speculators saves give the logits and the confidence that it computes.

See tests/speculators_block_oracle.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from speculators_block_oracle import BLOCKS
from speculators_oracle import BLOCK, HIDDEN, READ, VOCABULARY
from tiny import tiny_llama

from sampling.drafters.feature_sessions import BlockSession
from utils.drafter_formats.checkpoint import read_checkpoint
from utils.drafter_formats.dflash import DFlash
from utils.drafter_formats.formats import format_of
from utils.models.sources import locate

FIXTURES = Path(__file__).parent / "fixtures" / "speculators_blocks"


def drafter_of(folder: Path, run: dict[str, torch.Tensor]) -> DFlash:
    """The drafter of a folder, for a target with the stored embedding and output head."""
    target = tiny_llama(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_attention_heads=2, num_hidden_layers=6)
    target.model.embed_tokens.weight.data = run["embedding"]
    if len(run["lm_head"]) == VOCABULARY:
        target.lm_head.weight.data = run["lm_head"]
    checkpoint = read_checkpoint(locate(str(folder), print))
    assert checkpoint is not None
    row = format_of(checkpoint)
    assert row is not None and row.name.lower() == BLOCKS[folder.name][0]
    drafter = row.load(checkpoint, target)
    assert isinstance(drafter, DFlash) and drafter.feature_layers == tuple(READ)
    return drafter


@pytest.mark.parametrize("growth", [1, 2])
@pytest.mark.parametrize("name", BLOCKS)
def test_logits_and_confidence_are_those_of_the_package(name, growth):
    """Over rounds that each bring features of `growth` more positions."""
    run, stored = load_file(FIXTURES / name / "run.safetensors"), load_file(FIXTURES / name / "model.safetensors")
    chosen = stored["d2t"] + torch.arange(len(stored["d2t"])) if "d2t" in stored else torch.arange(VOCABULARY)
    drafter, context, known = drafter_of(FIXTURES / name, run), [0, *run["tokens"].tolist()], 0
    assert drafter.block_size == len(run["logits"]) in (BLOCK, BLOCK - 1)
    session = BlockSession(drafter)
    session.begin(context[:1])
    for last in range(growth - 1, run["logits"].shape[1], growth):
        end = last + 1
        session.rewind(end)
        session.add_features(run["features"][known:end], known, end)
        known = end
        for step, rows in enumerate(run["logits"]):
            text = context[: end + 1 + step]
            logits = session.feed(text, keep=1)[0]
            assert torch.allclose(logits[chosen], rows[last], atol=5e-5, rtol=1e-5), (last, step)
            assert int(torch.isneginf(logits).sum()) == VOCABULARY - len(chosen)
            confidence = session.confidence(text)
            assert (confidence is None) == ("confidence" not in run)
            assert confidence is None or abs(confidence - float(run["confidence"][step, last])) < 1e-5
