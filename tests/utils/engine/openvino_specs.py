"""Tiny decoders of random weights for the OpenVINO engine, and what PyTorch computes for them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu

from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE, VOCABULARY = 64, 4, 2, 16, 96, 40
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
}


def norm(size: int, seed: int) -> Norm:
    return Norm(1 + 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(seed)), 1e-5)


def tiny_spec(*, biases: bool = False, rotary_dim: int = HEAD_DIM, layers: int = 2, **changes: Any) -> DecoderSpec:
    """changes: of every LayerSpec."""
    generator = torch.Generator().manual_seed(1)

    def layer_of(name: str, outputs: int, inputs: int) -> Linear:
        weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return Linear(name, weight, torch.randn(outputs, generator=generator) if biases else None)

    def layer(index: int) -> LayerSpec:
        name = f"model.layers.{index}"
        width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        spec = LayerSpec(
            input_norm=norm(HIDDEN, 2 + index),
            query=layer_of(f"{name}.self_attn.q_proj", width, HIDDEN),
            key=layer_of(f"{name}.self_attn.k_proj", kv_width, HIDDEN),
            value=layer_of(f"{name}.self_attn.v_proj", kv_width, HIDDEN),
            query_norm=None,
            key_norm=None,
            output=layer_of(f"{name}.self_attn.o_proj", HIDDEN, width),
            attention_output_norm=None,
            mlp_norm=norm(HIDDEN, 3 + index),
            gate=layer_of(f"{name}.mlp.gate_proj", MIDDLE, HIDDEN),
            up=layer_of(f"{name}.mlp.up_proj", MIDDLE, HIDDEN),
            down=layer_of(f"{name}.mlp.down_proj", HIDDEN, MIDDLE),
            mlp_output_norm=None,
            activation="silu",
            window=None,
            rope=0,
            scaling=HEAD_DIM**-0.5,
        )
        return replace(spec, **changes)

    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    return DecoderSpec(
        hidden_size=HIDDEN,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rotary_dim=rotary_dim,
        vocabulary=VOCABULARY,
        embedding=embedding,
        embedding_scale=1.0,
        layers=tuple(layer(index) for index in range(layers)),
        ropes=(lambda positions: (positions.cos()[:, None], positions.sin()[:, None]),),
        final_norm=norm(HIDDEN, 9),
        head=layer_of("lm_head", VOCABULARY, HIDDEN),
    )


def _rms(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def _product(x: Tensor, part: Linear) -> Tensor:
    return linear(x, part.weight, part.bias)


def _head_norm(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None or norm.weight.numel() == HEAD_DIM:
        return _rms(x.unflatten(1, (-1, HEAD_DIM)), norm)
    return _rms(x, norm).unflatten(1, (-1, HEAD_DIM))


def qkv(spec: DecoderSpec, index: int, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Queries, keys and values of a layer: (rows, heads + 2 * kv_heads, head_dim)."""
    layer = spec.layers[index]
    h = _rms(x, layer.input_norm)
    query, key = (
        _head_norm(_product(h, layer.query), layer.query_norm),
        _head_norm(_product(h, layer.key), layer.key_norm),
    )
    both, value = torch.cat([query, key], 1), _product(h, layer.value).unflatten(1, (-1, HEAD_DIM))
    if layer.rope is not None:
        size = spec.rotary_dim
        part, rest = both[..., :size], both[..., size:]
        halves = torch.cat([-part[..., size // 2 :], part[..., : size // 2]], -1)
        both = torch.cat([part * tables[0][:, None] + halves * tables[1][:, None], rest], -1)
    return torch.cat([both, value], 1)


def after_attention(spec: DecoderSpec, index: int, x: Tensor, attended: Tensor) -> Tensor:
    """x after a layer: (rows, hidden)."""
    layer = spec.layers[index]
    x = x + layer.residual_scale * _rms(_product(attended, layer.output), layer.attention_output_norm)
    h = _rms(x, layer.mlp_norm)
    activated = ACTIVATIONS[layer.activation](_product(h, layer.gate)) * _product(h, layer.up)
    return x + layer.residual_scale * _rms(_product(activated, layer.down), layer.mlp_output_norm)
