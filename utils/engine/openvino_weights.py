"""Products with linear weights as OpenVINO nodes: float32, or small integers with scales.

OpenVINO multiplies integer weights with inputs that it rounds to int8, with one scale for each group of inputs of a
row. Only weights without an offset, or with one integer offset per group, keep the bits of a row independent of the
other rows. So values are stored around zero, and what a group's minimum adds is a small second product with the sums
of the inputs of each group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.engine.decoder_spec import Linear
from utils.engine.openvino_runtime import DYNAMIC_GROUP, GROUP_SETTING, ops, ov
from utils.engine.weight_blocks import BlockWeight, joined
from utils.engine.weight_format import EngineWeights

Weight = Tensor | BlockWeight
Storage = Callable[[Linear], Weight]  # in which form a layer's weight is computed
FLOAT = ov.Type.f32


def storage(weights: EngineWeights, head: Linear) -> Storage:
    """Return the form of each linear weight in a number format. What integer products do not fit stays float32."""

    def stored(linear: Linear) -> Weight:
        weight = linear.weight.detach()
        block = weights.block(linear.name, weight, is_head=linear is head)
        if block is None:
            return weight.to(torch.bfloat16 if weights.format == "bfloat16" else torch.float32)
        # Every engine computes the same values.
        return block if _fits(block) else block.dense()

    return stored


def _fits(block: BlockWeight) -> bool:
    """Whether OpenVINO has integer products for groups of this size."""
    return block.shape[1] % DYNAMIC_GROUP == 0 and (block.group % DYNAMIC_GROUP == 0 or block.group == 16)


def dynamic_group(weights: Sequence[Weight]) -> int:
    """Return how many inputs may share a scale in products with all of these weights."""
    return min([DYNAMIC_GROUP, *(weight.group for weight in weights if isinstance(weight, BlockWeight))])


def constant(values: Any) -> Any:
    """Return a node that holds a tensor or array. Tensors are shared, so nothing is copied."""
    array = values.detach().contiguous().numpy() if isinstance(values, Tensor) else np.ascontiguousarray(values)
    return ops.constant(array, shared_memory=array.ndim > 1)


def sizes(*values: int) -> Any:
    """Return a node with integers, such as a shape."""
    return ops.constant(np.array(values, dtype=np.int64))


def product(x: Any, linears: Sequence[Linear], stored: Storage) -> Any:
    """Return the node x @ W^T + b for all layers that read x, their outputs one after the other."""
    weights = [stored(linear) for linear in linears]
    whole = _joined(weights)
    y = ops.concat([multiplied(x, weight) for weight in weights], 1) if whole is None else multiplied(x, whole)
    if all(linear.bias is None for linear in linears):
        return y
    biases = [torch.zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
    return ops.add(y, constant(torch.cat(biases).detach().float()[None]))


def _joined(weights: Sequence[Weight]) -> Weight | None:
    if len(weights) == 1:
        return weights[0]
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    if len(blocks) == len(weights):
        return joined(blocks)
    return None if blocks else torch.cat([weight for weight in weights if isinstance(weight, Tensor)])


def multiplied(x: Any, weight: Weight) -> Any:
    """Return the node x @ W^T."""
    if isinstance(weight, Tensor):
        return ops.matmul(x, _floats(weight), False, True)
    y = ops.matmul(x, _centred(weight), False, True)
    offsets = _offsets(weight)
    if offsets is None:
        return y
    groups = ops.reshape(x, sizes(-1, weight.shape[1] // weight.group, weight.group), False)
    return ops.add(y, ops.matmul(ops.reduce_sum(groups, sizes(2), False), constant(offsets), False, True))


def _floats(weight: Tensor) -> Any:
    if weight.dtype is not torch.bfloat16:
        return constant(weight)
    bits = weight.detach().contiguous().view(torch.uint16).numpy()
    return ops.convert(_packed(bits, bits.shape, ov.Type.bf16), FLOAT)


def _centre(weight: BlockWeight) -> int:
    return 0 if weight.values.dtype is torch.int8 else 1 << (weight.bits - 1)


def _centred(weight: BlockWeight) -> Any:
    """The node (values - centre) * scales, shape (N, K)."""
    rows, inputs = weight.shape
    signed = (weight.values.to(torch.int16) - _centre(weight)).to(torch.int8)
    shape = (rows, inputs) if weight.group == inputs else (rows, inputs // weight.group, weight.group)
    integers = _integers(signed.reshape(shape).numpy(), four_bits=weight.bits <= 4)
    scaled = ops.multiply(ops.convert(integers, FLOAT), constant(weight.scales.float().reshape(*shape[:-1], 1)))
    return scaled if len(shape) == 2 else ops.reshape(scaled, sizes(rows, inputs), False)


def _integers(values: np.ndarray, *, four_bits: bool) -> Any:
    if not four_bits:
        return constant(values)
    nibbles = values.reshape(-1, 2).view(np.uint8) & 15
    return _packed(nibbles[:, 0] | nibbles[:, 1] << 4, values.shape, ov.Type.i4)


def _packed(bits: np.ndarray, shape: tuple[int, ...], kind: Any) -> Any:
    """A node of a type that numpy lacks. Unlike arrays, tensors are not kept by nodes, so their values are copied."""
    return ops.constant(ov.Tensor(bits, ov.Shape(shape), kind), shared_memory=False)


def _offsets(weight: BlockWeight) -> Tensor | None:
    """What is added to the centred weights of each group, (N, K / group), or None if it is zero everywhere."""
    offsets = weight.scales.float() * _centre(weight)
    if weight.minimums is not None:
        offsets = offsets + weight.minimums.float()
    return offsets if bool(offsets.any()) else None


def mark_dynamic_group(graph: Any, group: int) -> None:
    """Store in a graph how many inputs may share a scale. `compile_graph` reads it."""
    graph.set_rt_info(str(group), ["speculative_decoding", GROUP_SETTING])
