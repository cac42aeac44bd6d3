"""Weights without data, which only engines hold, and what fills them if transformers' own forward needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from utils.engine.weight_blocks import BlockWeight


def placeholder(weight: Tensor, origin: str) -> nn.Parameter:
    """Return a parameter of the same shape and number format without data. origin: identifies the data."""
    empty = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    empty.origin = origin  # type: ignore[attr-defined]
    return empty


class MissingWeights:
    """A hook that unpacks missing weights before a model computes by itself, as after an interrupted installation.

    blocks: the weights by the names of layers. Layer cuts of the model share the hook, and so what it has unpacked.
    """

    keeps_outputs = True  # it changes nothing of what the model computes

    def __init__(self, blocks: Mapping[str, BlockWeight]) -> None:
        self._blocks = blocks
        self._unpacked: dict[str, nn.Parameter] = {}

    def __call__(self, model: nn.Module, arguments: Any) -> None:
        if "forward" in vars(model):  # an engine computes the model
            return
        for name, part in model.named_modules():
            weight = part._parameters.get("weight")
            if weight is not None and weight.is_meta:
                if name not in self._unpacked:
                    self._unpacked[name] = nn.Parameter(self._blocks[name].dense(), requires_grad=False)
                part._parameters["weight"] = self._unpacked[name]
