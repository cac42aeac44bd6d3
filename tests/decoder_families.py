"""Tiny random models of the decoder families that engines compute themselves, and a plain forward pass over a spec.

Norms, biases and multipliers are random too, so that one that is left out changes the logits.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from tiny import DECODER, build
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm

COMMON: dict[str, Any] = DECODER | {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
PER_LAYER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
}
SLIDING_FIRST = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING = {"sliding_window": 11, "layer_types": SLIDING_FIRST}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
}
UNTIED = {"tie_word_embeddings": False}

# name: (model type, fields of its config)
FAMILY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 32}),
    "gemma2": (
        "gemma2",
        SLIDING | {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
    ),
    "gemma3_text": (
        "gemma3_text",
        SLIDING | {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 9, "rope_parameters": PER_LAYER_TYPE},
    ),
    "granite": ("granite", MULTIPLIERS | {"attention_bias": True, "head_dim": 16}),
    "llama": ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
    "llama with biases": (
        "llama",
        UNTIED | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3, "num_hidden_layers": 2},
    ),
    "llama with exact GELU": ("llama", {"hidden_act": "gelu", "num_hidden_layers": 2}),
    # 3 heads of 16 values: no multiple of 32.
    "llama of odd sizes": (
        "llama",
        {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "ministral": ("ministral", SLIDING | {"num_key_value_heads": 4}),
    "mistral": ("mistral", UNTIED | {"sliding_window": 10, "head_dim": 32, "num_hidden_layers": 2}),
    "olmo2": ("olmo2", UNTIED | {"num_key_value_heads": 4, "num_hidden_layers": 2}),
    "olmo3": ("olmo3", SLIDING | UNTIED | {"rope_parameters": PER_LAYER_TYPE}),
    "phi3": ("phi3", UNTIED | {"sliding_window": 9, "num_hidden_layers": 2}),
    "phi3 with partial rotary positions": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen2": ("qwen2", SLIDING | {"use_sliding_window": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1, "head_dim": 32, "rope_parameters": YARN}),
    "smollm3": ("smollm3", SLIDING | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1], "hidden_act": "relu"}),
}
FAMILIES = tuple(FAMILY_CONFIGS)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
# Plain; two kinds of layers, with all norms and a capped head; joined projections and a window; norms after layers.
REPRESENTATIVES = ("llama", "gemma3_text", "phi3", "olmo2")


def in_turn(rows: Iterable[tuple[str, ...]]) -> list[Any]:
    """Parameters whose last value is a family: `make test` runs the representatives, `make test-full` all."""
    marks = {True: (), False: (pytest.mark.full,)}
    return [pytest.param(*row, marks=marks[row[-1] in REPRESENTATIVES], id="-".join(row)) for row in rows]


def tiny_model(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a family in eval mode and float32. overrides: fields of its config."""
    model_type, fields = FAMILY_CONFIGS[name]
    config = CONFIG_MAPPING[model_type](**COMMON | fields | overrides)
    return randomized(build(AutoModelForCausalLM.from_config, config, seed), seed)


def randomized(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model with random norms and biases as well."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases, which transformers starts at 0 or 1
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def reference_logits(spec: DecoderSpec, tokens: Tensor) -> Tensor:
    """Logits (T, V) of the tokens (T,) without a cache, in the number format of the spec's weights."""
    positions = torch.arange(len(tokens))
    tables = [rope(positions) for rope in spec.ropes]
    x = F.embedding(tokens, spec.embedding) * spec.embedding_scale
    for layer in spec.layers:
        table = None if layer.rope is None else tables[layer.rope]
        attended = _linear(layer.output, _attention(spec, layer, _norm(layer.input_norm, x), table))
        x = x + layer.residual_scale * _norm(layer.attention_output_norm, attended)
        h = _norm(layer.mlp_norm, x)
        h = _linear(layer.down, ACTIVATIONS[layer.activation](_linear(layer.gate, h)) * _linear(layer.up, h))
        x = x + layer.residual_scale * _norm(layer.mlp_output_norm, h)
    logits = _linear(spec.head, _norm(spec.final_norm, x)) * spec.logit_scale
    cap = spec.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _attention(spec: DecoderSpec, layer: LayerSpec, x: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
    """The attended values (T, heads * head_dim) of the rows x (T, hidden)."""
    query = _heads(_head_norm(layer.query_norm, _linear(layer.query, x), spec.head_dim), spec.head_dim)
    key = _heads(_head_norm(layer.key_norm, _linear(layer.key, x), spec.head_dim), spec.head_dim)
    value = _heads(_linear(layer.value, x), spec.head_dim)
    if table is not None:
        cos, sin = (part.to(x.dtype) for part in table)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    groups = spec.heads // spec.kv_heads
    scores = query @ key.repeat_interleave(groups, dim=0).mT * layer.scaling
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    hidden = (distance < 0) | (distance >= (len(x) if layer.window is None else layer.window))
    probs = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return (probs @ value.repeat_interleave(groups, dim=0)).transpose(0, 1).flatten(1)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(1, (-1, head_dim)).transpose(0, 1)


def _head_norm(norm: Norm | None, x: Tensor, head_dim: int) -> Tensor:
    each = norm is not None and len(norm.weight) == head_dim
    return _norm(norm, x.unflatten(1, (-1, head_dim))).flatten(1) if each else _norm(norm, x)


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    wide = x.float()  # transformers computes norms in float32, in every format
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (norm.weight * wide).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    return torch.cat([x[..., :size] * cos + torch.cat([-second, first], dim=-1) * sin, x[..., size:]], dim=-1)


def _linear(linear: Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)
