"""Whether a model computes combs as they are meant: tried once per model and engine, on the model's own weights.

A model that ignores masks or positions would return wrong logits without an error. And where the rows of leaves differ
in bits from single decode steps, texts may differ at near-ties, which the screen must say.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from utils.decode.engine_forward import engine_forward
from utils.decode.logit_drift import max_rounding
from utils.decode.model_info import context_length, vocabulary_size
from utils.decode.model_session import ModelSession
from utils.decode.steps import Leaf
from utils.decode.tree_pass import tree_obstacle

PREFIX = 61  # tokens before the comb, so that its rows cross position 64, where row attention pads its keys
CHAIN = 4  # drafts
PLACES = (0, 0, 1, 3)  # of the leaves


@dataclass(frozen=True, slots=True)
class TreeSupport:
    """obstacle: why combs cannot be used, as the rest of a sentence, or empty. equal_bits: whether the logits of leaves
    had the bits of single decode steps in the test.
    """

    obstacle: str = ""
    equal_bits: bool = False


_known: WeakKeyDictionary[Any, tuple[object, TreeSupport]] = WeakKeyDictionary()


def tree_support(model: Any, *, use_cache: bool = True) -> TreeSupport:
    """What the loaded model, as it is computed now, can do with combs."""
    if obstacle := tree_obstacle(model, use_cache=use_cache):
        return TreeSupport(obstacle)
    computed = engine_forward(model), model.config._attn_implementation
    if model not in _known or _known[model][0] != computed:
        _known[model] = computed, _tried(model)
    return _known[model][1]


@torch.no_grad()
def _tried(model: Any) -> TreeSupport:
    equal = True
    for found, expected in _rows(model):
        difference = float((found - expected).abs().nan_to_num(torch.inf).max())
        if difference > max_rounding(expected):
            return TreeSupport("the target's forward pass does not follow tree masks")
        equal = equal and torch.equal(found, expected)
    return TreeSupport(equal_bits=equal)


def _rows(model: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (V,) after each leaf and after a token that follows it, computed by combs and by single steps."""
    vocabulary, limit = vocabulary_size(model), context_length(model)
    count = PREFIX if limit is None else max(2, min(PREFIX, limit - CHAIN - 3))
    ids = [(31 * index + 7) % vocabulary for index in range(count + CHAIN + 1)]
    context, drafts, after = ids[:count], ids[count:-1], ids[-1]
    leaves = tuple(Leaf(place, (drafts[place] + 1 + rank) % vocabulary) for rank, place in enumerate(PLACES))
    base = ModelSession(model)
    base.feed(base.begin(context)[:-1], keep=1)
    for index, leaf in enumerate(leaves):
        path = [*context, *drafts[: leaf.place], leaf.token]
        comb, steps = base.fork(), base.fork()
        row = comb.feed(context + drafts, CHAIN + 1, leaves)[CHAIN + 1 + index]
        for length in range(count, len(path) + 1):
            expected = steps.feed(path[:length], keep=1)[0]
        yield row.float(), expected.float()
        comb.rewind(len(path), index)
        yield comb.feed([*path, after], keep=1)[0].float(), steps.feed([*path, after], keep=1)[0].float()
