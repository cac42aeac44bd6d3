"""What a decoder computes, independent of how transformers spells it: weights, norms, rotary tables and scales.

Engines that compute a model by a forward pass of their own read a DecoderSpec, so they need not know the families.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "silu")  # functions between the projections of an MLP


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm over the last dimension, x / sqrt(mean(x^2) + eps) * weight.

    weight: as it is multiplied, in float32, contiguous. Families that store weight - 1, such as Gemma, are converted.
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

    def with_parts(self, kind: type, change: Callable[[Any], Any]) -> "LayerSpec":
        """The same layer with all parts of one kind, norms or linear layers, changed."""
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: change(part) for name, part in parts if isinstance(part, kind)})


RopeTable = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions (T,) -> cos, sin: (T, rotary_dim), float32


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only model: logits = softcap(head(final_norm(layers(embedding(ids) * embedding_scale))) * logit_scale).

    Rotary positions rotate the first rotary_dim values of each head in halves, as Llama does:
    y = x * cos + concat(-x2, x1) * sin. softcap(z) = logit_softcap * tanh(z / logit_softcap), or z if it is None.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    vocabulary: int
    embedding: Tensor
    embedding_scale: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeTable, ...]
    final_norm: Norm
    head: Linear
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def scaled(self, logits: Tensor) -> Tensor:
        """The logits of the model, from those of its head."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.logit_softcap is None else torch.tanh(logits / self.logit_softcap) * self.logit_softcap

    def with_linears(self, change: Callable[[Linear], Linear]) -> "DecoderSpec":
        """The same decoder with all of its linear layers changed."""
        layers = tuple(layer.with_parts(Linear, change) for layer in self.layers)
        return replace(self, layers=layers, head=change(self.head))

    def without_weights(self) -> "DecoderSpec":
        """The same without the matrices of linear layers, so that they can be freed. Embedding and norms stay."""
        return self.with_linears(lambda linear: replace(linear, weight=torch.empty(0), bias=None))


@dataclass(frozen=True, slots=True)
class JoinedInput:
    """What a drafter's layer reads: token_norm(embedding) and state_norm(x) side by side. Its change is added to x, or
    with `normed_residual` to state_norm(x).
    """

    token_norm: Norm
    state_norm: Norm
    normed_residual: bool


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A drafter of one token after the other, as EAGLE-3: logits = head(final_norm(layers(x, embedding(token)))).

    inputs: of each layer; None for a decoder layer that reads x alone. mixtures: for each layer the product that is its
    whole change, or None for one that attends: these are `decoder.layers`, whose input_norm is None if they have a
    joined input. Without `norm_before_head` the head reads x itself.
    """

    decoder: DecoderSpec
    inputs: tuple[JoinedInput | None, ...]
    mixtures: tuple[Linear | None, ...]
    norm_before_head: bool
