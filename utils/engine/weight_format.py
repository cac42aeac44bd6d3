"""The number format in which engines compute linear weights, whatever format they were loaded in."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.engine.stored_weights import data, source_of
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

    def form(self, name: str, weight: Tensor, *, is_head: bool) -> Tensor | BlockWeight:
        """Return a weight (N, K) as it is computed in this format. It is read if it is in a file.

        name: of the layer; a part of a fused parameter has its row range appended, as in "qkv_proj[0:64]".
        """
        if self.format == "gguf":
            shipped = self._shipped(name, weight)
            return data(weight) if shipped is None else shipped
        loaded = data(weight)
        if self.format == "int8" or (self.format == "int4" and (is_head or loaded.shape[1] % INT4_GROUP)):
            return round_int8(loaded)  # the output head decides the tokens, so it keeps 8 bits
        if self.format == "int4":
            block = round_int4(loaded)
            return round_int8(loaded) if _needs_8_bits(name, loaded, block) else block
        return loaded.bfloat16() if self.format == "bfloat16" else loaded

    def rounded(self, name: str, weight: Tensor, *, is_head: bool) -> Tensor:
        """Return the values of `form` as a tensor in the format in which the weight was loaded."""
        form = self.form(name, weight, is_head=is_head)
        return form.dense() if isinstance(form, BlockWeight) else form.to(weight.dtype)

    def _shipped(self, name: str, weight: Tensor) -> BlockWeight | None:
        """The blocks of the file, or None for a weight that is not stored in blocks."""
        layer, _, part = name.partition("[")
        source = source_of(weight)
        block = (self.blocks or {}).get(layer if source is None else source.name)  # cut models have other names
        if block is not None and part:
            start, end = map(int, part.rstrip("]").split(":"))
            block = block.rows(start, end)
        if source is not None:
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
