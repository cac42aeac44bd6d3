"""Tiny random targets whose folders hold MTP layers, with one tensor for each expert, as published checkpoints have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter_checkpoints import random_tensors
from safetensors.torch import load_file, save_file
from tiny import DECODER, build, save_folder
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

LAYERS, HIDDEN, EXPERTS = 3, 32, 4
SPARSE = {
    "num_hidden_layers": LAYERS,
    "moe_intermediate_size": 16,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}


def tiny_glm(seed: int = 0, **overrides: Any) -> Glm4MoeForCausalLM:
    """A sparse target with norms on the heads of queries and keys."""
    own = {"head_dim": 16, "use_qk_norm": True, "partial_rotary_factor": 1.0}
    return build(Glm4MoeForCausalLM, Glm4MoeConfig(**DECODER | SPARSE | own | overrides), seed)


def tiny_deepseek(seed: int = 0, **overrides: Any) -> DeepseekV3ForCausalLM:
    """A sparse target with multi-head latent attention and groups of experts."""
    own = {"n_group": 2, "topk_group": 1}
    return build(DeepseekV3ForCausalLM, DeepseekV3Config(**DECODER | SPARSE | LATENT | own | overrides), seed)


def tiny_glm_lite(seed: int = 0, **overrides: Any) -> Glm4MoeLiteForCausalLM:
    """GLM-4.7-Flash: layers as in DeepSeek-V3, described by other keys."""
    return build(Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig(**DECODER | SPARSE | LATENT | overrides), seed)


LINEAR = {
    "num_hidden_layers": LAYERS,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
QWEN = {
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
}


def tiny_qwen(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """A hybrid target, whose last layer has linear attention. Its MTP layer has full attention."""
    model_class, config_class = QWEN[kind]
    return build(model_class, config_class(**DECODER | LINEAR | overrides), seed)


def tiny_qwen3(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """A target without experts."""
    own = {"num_hidden_layers": LAYERS, "head_dim": 16, "rope_theta": 5000.0, "initializer_range": 0.3}
    return build(Qwen3ForCausalLM, Qwen3Config(**DECODER | own | overrides), seed)


def tiny_mellum(seed: int = 0, **overrides: Any) -> MellumForCausalLM:
    """A sparse target whose last layer and MTP layer have sliding attention, with frequencies of their own."""
    own = {name: LINEAR[name] for name in ("head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size")}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    own |= {"num_hidden_layers": LAYERS, "layer_types": types, "sliding_window": 4, "num_mtp_layers": 1}
    return build(MellumForCausalLM, MellumConfig(**DECODER | own | {"initializer_range": 0.3} | overrides), seed)


def separated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with one for each expert and projection."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".experts.")
        kind = kind.removesuffix(".weight")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for index, expert in enumerate(tensor):
            for part_name, part in zip(names, expert.chunk(len(names)), strict=True):
                found[f"{prefix}.experts.{index}.{part_name}.weight"] = part
    return found


def layer_tensors(target: Any, seed: int = 5) -> dict[str, Tensor]:
    """Random weights of one more of the target's layers with full attention."""
    layer = next(layer for layer in reversed(target.get_decoder().layers) if hasattr(layer, "self_attn"))
    shapes = {name: tuple(part.shape) for name, part in separated(layer.state_dict()).items()}
    return random_tensors(shapes, seed)


def deepseek_layers(target: Any, *, copies: bool = True, number: int = LAYERS) -> dict[str, Tensor]:
    """An MTP layer with the names of DeepSeek-V3 and GLM. copies: with the embedding and the output head."""
    norms = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (HIDDEN,))
    own = random_tensors(norms | {"eh_proj.weight": (HIDDEN, 2 * HIDDEN)}, seed=6) | layer_tensors(target)
    if copies:
        own |= {
            "embed_tokens.weight": target.model.embed_tokens.weight,
            "shared_head.head.weight": target.lm_head.weight,
        }
    return {f"model.layers.{number}.{name}": tensor for name, tensor in own.items()}


def qwen_layers(target: Any) -> dict[str, Tensor]:
    """An MTP layer with the names of Qwen3-Next and Qwen3.5."""
    norms = dict.fromkeys(("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"), (HIDDEN,))
    own = random_tensors(norms | {"fc.weight": (HIDDEN, 2 * HIDDEN)}, seed=6)
    own |= {f"layers.0.{name}": tensor for name, tensor in layer_tensors(target).items()}
    return {f"mtp.{name}": tensor for name, tensor in own.items()}


def write_target(folder: Path, target: Any, layers: dict[str, Tensor], tokenizer: Any = None) -> Path:
    """Write a target's folder, with further tensors in its file."""
    save_folder(folder, target, tokenizer)
    path = folder / "model.safetensors"
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in (load_file(path) | layers).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
