"""What a decoder computes, independent of how transformers spells it: weights, norms, rotary tables and scales.

Engines that compute a model by a forward pass of their own read a DecoderSpec, so they need not know the families.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Segments(Protocol):
    """The parts of a decoder outside attention, for `rows` rows of any batch, on the CPU in float32.

    Results may be buffers that the next call with the same number of rows overwrites, so that callers copy what they
    keep longer: `advance` i + 1 may read the x that `advance` i returned.

    `prefill` says that rows need not have the bits of single decode steps. Otherwise a row's bits must not depend on
    the number of rows or on their values.
    """

    prefill_rows: Sequence[int]  # numbers of rows of one sequence for which a prefill is fastest, in ascending order
    row_threads: int | None  # PyTorch's threads between the parts, except in a prefill. None: as many as are set

    def begin(self, x: Tensor, *, cos: Tensor, sin: Tensor, prefill: bool) -> Tensor:
        """Return qkv of layer 0 for x (rows, hidden). cos, sin: (rows, rotary_dim) of layer 0, empty without rotary
        positions. qkv: (rows, heads + 2 * kv_heads, head_dim): the heads of the queries, keys and values, with norms
        and rotary positions applied.
        """

    def advance(
        self, layer: int, x: Tensor, attended: Tensor, *, cos: Tensor, sin: Tensor, prefill: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return x (rows, hidden) after layer `layer`, and qkv of the next layer (None after the last one).

        attended: (rows, heads * head_dim) of layer `layer`. cos, sin: of the next layer.
        """

    def logits(self, x: Tensor) -> Tensor:
        """Return the products of the output head (rows, V) with x (rows, hidden), to which the final norm was applied.
        Scale and softcap are left to the caller.
        """

    def run_products(self) -> None:
        """Compute the products of one decode step alone, on inputs of zeros: the least time that a step can take."""


def _gelu(x: Tensor) -> Tensor:
    # PyTorch's CPU kernel for other layouts rounds differently. A slice of one row is contiguous, one of two is not.
    return F.gelu(x.contiguous())


# name: the function between the projections of an MLP. On CPUs, silu and gelu_pytorch_tanh round the last values of a
# contiguous tensor differently unless their number is a multiple of 32. So a row of any other size depends on the
# number of rows, unless the rows are strided: parts of a wider tensor.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm over the last dimension, x / sqrt(mean(x^2) + eps) * weight.

    weight: as it is multiplied. Families that store weight - 1, such as Gemma, are converted, to float32.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """A product x W^T + b. weight: (N, K), bias: (N,) or None.

    name: of the parameter within the model, without ".weight"; a part of a fused parameter has its row range appended,
    as in "model.layers.0.self_attn.qkv_proj[0:64]".
    """

    name: str
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer over x (rows, hidden):

    a = attention(rope(q_norm(q)), rope(k_norm(k)), v) with q, k, v = linear(input_norm(x));
    x = x + residual_scale * attention_output_norm(output(a));
    x = x + residual_scale * mlp_output_norm(down(activation(gate(h)) * up(h))) with h = mlp_norm(x).

    None stands for no norm. q_norm, k_norm: over each head's head_dim values if their weight has that size, or
    over all heads together otherwise. activation: a name in ACTIVATIONS. window: the sliding window in tokens, its own
    position included; None for full attention. rope: an index into DecoderSpec.ropes; None for a layer without
    positions. scaling: of the attention scores.
    """

    input_norm: Norm | None
    query: Linear
    key: Linear
    value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    gate: Linear
    up: Linear
    down: Linear
    mlp_output_norm: Norm | None
    activation: str
    window: int | None
    rope: int | None
    scaling: float
    residual_scale: float = 1.0


RopeTable = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions (T,) -> cos, sin: (T, rotary_dim), float32


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only model: logits = softcap(head(final_norm(layers(embedding(ids) * embedding_scale))) * logit_scale).

    Rotary positions rotate the first rotary_dim values of each head in halves, as Llama does:
    y = x * cos + concat(-x2, x1) * sin. softcap(z) = logit_softcap * tanh(z / logit_softcap), or z if it is None.
    embedding: never one that multiplies by a scale itself.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    vocabulary: int
    embedding: nn.Embedding
    embedding_scale: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeTable, ...]
    final_norm: Norm
    head: Linear
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def without_weights(self) -> "DecoderSpec":
        """The same without the matrices of linear layers, so that they can be freed. Embedding and norms stay."""
        return replace(self, layers=tuple(map(_without_weights, self.layers)), head=_emptied(self.head))


def _without_weights(layer: LayerSpec) -> LayerSpec:
    return replace(
        layer,
        query=_emptied(layer.query),
        key=_emptied(layer.key),
        value=_emptied(layer.value),
        output=_emptied(layer.output),
        gate=_emptied(layer.gate),
        up=_emptied(layer.up),
        down=_emptied(layer.down),
    )


def _emptied(linear: Linear) -> Linear:
    return replace(linear, weight=torch.empty(0), bias=None)
