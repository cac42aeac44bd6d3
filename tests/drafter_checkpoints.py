"""Random checkpoints of published drafter formats, written to folders in the layouts that programs use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, WIDTH, HEADS, GROUPS, SIZE = 32, 48, 4, 2, 16  # of tiny drafters; SIZE: of a head, not HIDDEN / HEADS
VOCABULARY = 64  # of tiny targets


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Weights of a useful spread; norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, *, entrance: int = HIDDEN, head_norms: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder layer. entrance: the input size of its attention."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * SIZE, entrance),
        "self_attn.k_proj.weight": (GROUPS * SIZE, entrance),
        "self_attn.v_proj.weight": (GROUPS * SIZE, entrance),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "mlp.up_proj.weight": (WIDTH, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, WIDTH),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if head_norms:
        shapes |= {"self_attn.q_norm.weight": (SIZE,), "self_attn.k_norm.weight": (SIZE,)}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def draft_vocabulary(size: int, every: int, seed: int) -> dict[str, Tensor]:
    """d2t and t2d of a draft vocabulary with one of `every` target ids."""
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: size // every].sort().values
    member = torch.zeros(size, dtype=torch.bool).index_fill_(0, chosen, True)
    return {"d2t": chosen - torch.arange(len(chosen)), "t2d": member}


def layer_keys(**others: Any) -> dict[str, Any]:
    """The keys of a config that describe the layers."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
    } | others


def eagle3_tensors(flags: dict[str, Any], *, layers: int = 1, head_norms: bool = False, every: int = 2) -> Any:
    """Weights in the speculators layout. every: the draft vocabulary has one of so many tokens."""
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "layers.0.hidden_norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCABULARY // every, HIDDEN)
    for index in range(layers):
        entrance = HIDDEN if index else 2 * HIDDEN
        shapes |= layer_shapes(f"layers.{index}.", entrance=entrance, head_norms=head_norms)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    tensors = random_tensors(shapes, seed=1)
    return tensors | (draft_vocabulary(VOCABULARY, every, seed=2) if every > 1 else {})


def speculators_config(flags: dict[str, Any], **others: Any) -> dict[str, Any]:
    keys = layer_keys(vocab_size=VOCABULARY, model_type="llama")
    flags = {"norm_before_residual": False} | flags
    return {"speculators_model_type": "eagle3", "transformer_layer_config": keys} | flags | others


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
