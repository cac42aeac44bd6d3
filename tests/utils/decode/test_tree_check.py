"""Combs are tried on the loaded model before they are used."""

import inspect
from typing import Any

import pytest
import torch
from decoder_families import tiny_model
from tiny import tiny_llama

from utils.decode import tree_pass
from utils.decode.tree_check import TreeSupport, tree_support
from utils.decode.tree_pass import TreePass
from utils.engine import Engine


def test_the_engine_decides_whether_bits_are_equal() -> None:
    model = tiny_model("llama")
    assert tree_support(model) == TreeSupport(equal_bits=False)
    engine = Engine([model])
    assert engine.use("invariant", 1).verified
    assert tree_support(model) == TreeSupport(equal_bits=True)  # tried again for the new engine
    engine.use("plain", 1)
    assert tree_support(model) == TreeSupport(equal_bits=False)


def ignoring(model: Any, *names: str) -> Any:
    """A model whose forward pass drops arguments."""
    original = model.forward

    def forward(*args: Any, position_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        given = {"position_ids": position_ids, "attention_mask": attention_mask}
        return original(*args, **kwargs, **{name: value for name, value in given.items() if name not in names})

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # sessions read it
    model.forward = forward
    return model


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_a_model_that_ignores_masks_or_positions_is_refused(name: str) -> None:
    assert not tree_support(ignoring(tiny_llama())).obstacle
    assert "tree masks" in tree_support(ignoring(tiny_llama(), name)).obstacle


def test_known_mistakes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmoved(self: TreePass, cache: Any, leaf: int) -> None: ...

    def shifted(self: TreePass, device: torch.device) -> torch.Tensor:
        rows = [*range(self.count), *(row + 1 for row in self.replaced)]
        return self.past + torch.tensor([rows], device=device)

    for name, mistake in (("accept", unmoved), ("_positions", shifted)):
        with monkeypatch.context() as patch:
            patch.setattr(tree_pass.TreePass, name, mistake)
            assert tree_support(tiny_llama(seed=8)).obstacle


def test_short_contexts_and_small_vocabularies_can_be_tried() -> None:
    assert not tree_support(tiny_llama(vocab_size=7, max_position_embeddings=16)).obstacle
