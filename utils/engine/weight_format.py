"""The number format in which engines compute linear weights, whatever format they were loaded in."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.engine.weight_blocks import INT4_GROUP, BlockWeight, round_int4, round_int8


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """What --engine-weights asks for.

    format: "float32" (weights as they were loaded), "bfloat16", "int8", "int4" or "gguf". blocks: for "gguf", weights
    of the target by the names of its layers, such as "model.layers.0.mlp.up_proj".
    """

    format: str = "float32"
    blocks: Mapping[str, BlockWeight] | None = None

    @property
    def as_loaded(self) -> bool:
        """Whether weights are computed in the format in which they were loaded. Any other rounds them for good."""
        return self.format == "float32"

    def block(self, name: str, weight: Tensor, *, is_head: bool) -> BlockWeight | None:
        """Return a weight (N, K) in this format, or None if it is not computed as integers in it.

        name: of the layer; a part of a fused parameter has its row range appended, as in
        "qkv_proj[0:64]".
        """
        if self.format == "gguf":
            return self._shipped(name, weight)
        # The output head decides the tokens, so it keeps 8 bits.
        if self.format == "int4" and not is_head and weight.shape[1] % INT4_GROUP == 0:
            block = round_int4(weight)
            return round_int8(weight) if _needs_8_bits(name, weight, block) else block
        if self.format in ("int4", "int8"):
            return round_int8(weight)
        return None

    def _shipped(self, name: str, weight: Tensor) -> BlockWeight | None:
        layer, _, part = name.partition("[")
        block = (self.blocks or {}).get(layer)
        if block is not None and part:
            start, end = map(int, part.rstrip("]").split(":"))
            block = block.rows(start, end)
        if weight.is_meta:  # it has no other data
            return block
        # A drafter may have the target's parameter names but not its weights, and columns may have been reordered.
        return block if block is not None and torch.equal(block.dense(), weight) else None


def _needs_8_bits(name: str, weight: Tensor, block: BlockWeight) -> bool:
    """Whether int4 keeps a weight in 8 bits: the last of an MLP, whose rounding changes texts most.

    Weights on a grid of 4 bits stay there, because 8 bits would change them more.
    """
    if not name.endswith("down_proj"):
        return False
    errors = [(rounded.dense() - weight).square().sum() for rounded in (block, round_int8(weight))]
    return bool(errors[1] < errors[0])
