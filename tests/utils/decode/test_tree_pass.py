"""Verify passes over combs: every leaf's row is that of the text that ends with it, and an accepted leaf stays."""

from typing import Any

import pytest
import torch
from decoder_families import FAMILIES, tiny_model

from utils.decode.model_session import ModelSession
from utils.decode.steps import Leaf
from utils.decode.tree_pass import tree_obstacle
from utils.engine import Engine

DRAFTS = [3, 4, 5, 6]
LEAVES = (Leaf(0, 11), Leaf(0, 12), Leaf(2, 13), Leaf(3, 14))
STATES = (0, 2)  # hidden states that are kept
# Row attention pads keys to a multiple of 64: the drafts lie before, across and behind such an end.
PREFIXES = (5, 61, 64, 127)


def opened(model: Any, length: int) -> tuple[ModelSession, list[int]]:
    """A session that was fed a text of this length, and the text with a token that follows it."""
    session = ModelSession(model, features=STATES)
    context = session.begin([(7 * index + 3) % 90 for index in range(length + 1)])
    session.feed(context[:-1], keep=1)
    session.rewind(length)
    session.take_features()
    return session, context


def by_steps(model: Any, length: int, tokens: list[int]) -> torch.Tensor:
    """Logits (V,) after the text and these tokens, and its features, by single steps."""
    session, context = opened(model, length)
    for count in range(len(tokens) + 1):
        logits = session.feed(context + tokens[:count], keep=1)
    features = session.take_features()
    assert features is not None
    return torch.cat([logits[0], *features])


def by_comb(model: Any, length: int, leaf: int | None, following: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of a leaf (None: of the last draft) with the features on its path, and the same for the tokens that
    follow it in the next pass.
    """
    session, context = opened(model, length)
    logits = session.feed(context + DRAFTS, keep=len(DRAFTS) + 1, leaves=LEAVES)
    assert logits.shape[0] == 1 + len(DRAFTS) + len(LEAVES)
    path = DRAFTS if leaf is None else [*DRAFTS[: LEAVES[leaf].place], LEAVES[leaf].token]
    session.rewind(length + 1 + len(path), leaf)
    features = session.take_features()
    assert features is not None
    row = torch.cat([logits[len(DRAFTS) if leaf is None else 1 + len(DRAFTS) + leaf], *features])
    logits = session.feed([*context, *path, *following], keep=1)
    features = session.take_features()
    assert features is not None
    return row, torch.cat([logits[0], *features])


def paths() -> list[tuple[int | None, list[int]]]:
    """The chain, and the path to every leaf."""
    return [(None, DRAFTS), *((index, [*DRAFTS[: leaf.place], leaf.token]) for index, leaf in enumerate(LEAVES))]


@pytest.mark.parametrize("length", PREFIXES)
def test_rows_of_a_comb_are_those_of_single_steps(length: int) -> None:
    model = tiny_model("llama")
    for leaf, path in paths():
        row, after = by_comb(model, length, leaf, [20, 21])
        torch.testing.assert_close(row, by_steps(model, length, path), atol=5e-5, rtol=0)
        logits = by_steps(model, length, [*path, 20, 21])[: model.config.vocab_size]
        torch.testing.assert_close(after[: len(logits)], logits, atol=5e-5, rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma2"])  # its attention is eager
def test_the_lean_forward_has_the_bits_of_single_steps(family: str) -> None:
    model = tiny_model(family)
    assert Engine([model]).use("invariant", 1).verified and not tree_obstacle(model)
    for length in PREFIXES:
        for leaf, path in paths():
            row, after = by_comb(model, length, leaf, [20])
            assert torch.equal(row, by_steps(model, length, path))
            logits = by_steps(model, length, [*path, 20])[: model.config.vocab_size]
            assert torch.equal(after[: len(logits)], logits)


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_sliding_windows_are_refused_without_an_engine_that_keeps_all_entries(name: str) -> None:
    assert "full attention" in tree_obstacle(tiny_model(name))


def test_a_comb_needs_a_cache() -> None:
    assert "cache" in tree_obstacle(tiny_model("llama"), use_cache=False)
