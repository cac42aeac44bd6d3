"""Verify passes over a comb: a chain of drafts, and leaves beside it (the trees of SpecInfer, arXiv 2305.09781, with
branches of one token).

The chain's rows come first, the leaves' rows last. A leaf stands at the position of the draft that it could replace,
and attends to what is before that draft and to itself. An accepted leaf's cache entry is moved to that position.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from utils.decode.engine_forward import engine_forward
from utils.decode.kv_cache import GrowingLayer, new_cache
from utils.decode.model_info import is_spread
from utils.decode.steps import Leaf

LEAVES = "leaves"  # the argument of an engine's forward pass that computes them by itself


@dataclass(frozen=True, slots=True)
class TreePass:
    """One pass over a comb. past: entries in the cache before it. count: rows of the chain. replaced: for each leaf,
    the row of the chain's draft that it could replace.
    """

    past: int
    count: int
    replaced: tuple[int, ...]

    @classmethod
    def of(cls, leaves: Sequence[Leaf], past: int, count: int, keep: int) -> "TreePass":
        """keep: rows of the chain whose logits are kept: the token before the drafts, and the drafts."""
        first = count - keep + 1  # the row of draft 0
        return cls(past, count, tuple(first + leaf.place for leaf in leaves))

    @property
    def entries(self) -> int:
        """Entries in the cache after the pass."""
        return self.past + self.count + len(self.replaced)

    def arguments(self, model: Any) -> dict[str, Any]:
        """Further arguments of the model's forward pass."""
        if engine_forward(model) is not None:
            return {LEAVES: self.replaced}
        return {"position_ids": self._positions(model.device), "attention_mask": self._mask(model)}

    def _positions(self, device: torch.device) -> Tensor:
        rows = [*range(self.count), *self.replaced]
        return self.past + torch.tensor([rows], device=device)  # (1, T)

    def _mask(self, model: Any) -> Tensor:
        """What is added to the scores (1, 1, T, past + T)."""
        total = self.count + len(self.replaced)
        allowed = torch.zeros(total, self.past + total, dtype=torch.bool)
        allowed[: self.count, : self.past + self.count] = torch.ones(
            self.count, self.past + self.count, dtype=torch.bool
        ).tril(self.past)
        for row, replaced in enumerate(self.replaced, start=self.count):
            allowed[row, : self.past + replaced] = True
            allowed[row, self.past + row] = True
        mask = torch.zeros(allowed.shape, dtype=model.dtype)
        return mask.masked_fill_(~allowed, torch.finfo(model.dtype).min).to(model.device)[None, None]

    def accept(self, cache: Any, leaf: int) -> None:
        """Move the entry of a leaf to the position of the draft that it replaces."""
        source, place = self.past + self.count + leaf, self.past + self.replaced[leaf]
        for layer in cache.layers:
            layer.keys[..., place, :] = layer.keys[..., source, :]
            layer.values[..., place, :] = layer.values[..., source, :]

    def path(self, features: Tensor, leaf: int | None) -> Tensor:
        """Of the features (T, F) of all rows, those of the chain, or of the path to an accepted leaf."""
        if leaf is None:
            return features[: self.count]
        return torch.cat([features[: self.replaced[leaf]], features[self.count + leaf][None]])


def tree_obstacle(model: Any, *, use_cache: bool = True) -> str:
    """Why no comb can be verified with this model, as the rest of a sentence; empty if nothing is known against it."""
    if model.config.is_encoder_decoder:
        return "the target is an encoder-decoder model"
    if not use_cache:
        return "the cache is off"
    if is_spread(model):
        return "the target's layers are on several devices"
    if (forward := engine_forward(model)) is not None:
        return "" if LEAVES in inspect.signature(type(forward).__call__).parameters else "its engine has no tree masks"
    if getattr(model, "_is_stateful", False) or any(
        type(layer) is not GrowingLayer for layer in new_cache(model.config).layers
    ):
        return "the target has layers that are not full attention"
    if not {"position_ids", "attention_mask"} <= inspect.signature(model.forward).parameters.keys():
        return "the target takes no positions or no mask"
    return ""
