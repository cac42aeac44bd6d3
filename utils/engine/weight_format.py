"""The number format in which engines compute linear weights, whatever format they were loaded in."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from utils.engine.weight_blocks import INT4_GROUP, BlockWeight, round_int4, round_int8


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """What --engine-weights asks for.

    format: "float32" (weights as they were loaded), "bfloat16", "int8", "int4" or "gguf". blocks: weights of the
    target by parameter names, such as "model.layers.0.mlp.up_proj.weight", for "gguf".
    """

    format: str = "float32"
    blocks: Mapping[str, BlockWeight] | None = None

    @property
    def as_loaded(self) -> bool:
        """Whether weights are computed in the format in which they were loaded. Any other rounds them for good."""
        return self.format == "float32"

    def block(self, name: str, weight: Tensor, *, is_head: bool) -> BlockWeight | None:
        """Return a weight (N, K) in this format, or None if it is not computed as integers.

        name: of the layer, without ".weight"; a part of a fused parameter has its row range appended, as in
        "qkv_proj[0:64]".
        """
        if self.format == "gguf":
            return self._shipped(name)
        if self.format == "int8":
            # The output head decides the tokens, so it keeps its precision.
            return None if is_head else round_int8(weight)
        if self.format == "int4":
            return round_int8(weight) if is_head or weight.shape[1] % INT4_GROUP else round_int4(weight)
        return None

    def _shipped(self, name: str) -> BlockWeight | None:
        parameter, _, part = name.partition("[")
        block = (self.blocks or {}).get(f"{parameter}.weight")
        if block is None or not part:
            return block
        start, end = map(int, part.rstrip("]").split(":"))
        return block.rows(start, end)
