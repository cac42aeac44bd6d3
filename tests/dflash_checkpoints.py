"""Random DFlash, DFlash2 and DSpark checkpoints in the layouts of z-lab and of speculators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter_checkpoints import HIDDEN, draft_vocabulary, layer_keys, layer_shapes, random_tensors
from tiny import tiny_llama

from utils.drafter_formats.checkpoint import read_checkpoint
from utils.drafter_formats.dflash import DFlash
from utils.drafter_formats.formats import format_of
from utils.models.sources import locate

VOCABULARY, LAYERS, BLOCK, MASK = 64, 6, 4, 60


def target_model(**overrides: Any) -> Any:
    return tiny_llama(num_hidden_layers=LAYERS, **overrides)


def tensors_of(
    *,
    layers: int = 1,
    every: int = 1,
    markov: int = 0,
    confidence: int = 0,
    own: bool = False,
    vocabulary: int = VOCABULARY,
) -> Any:
    """Weights. every: the draft vocabulary has one of so many tokens. markov: rank. confidence: inputs of its head.
    own: whether it has an embedding; drafters with a Markov head have an output head too.
    """
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "hidden_norm.weight": (HIDDEN,)}
    for index in range(layers):
        shapes |= layer_shapes(f"layers.{index}.", head_norms=True)
    if own:
        shapes["embed_tokens.weight"] = (vocabulary, HIDDEN)
    if markov:
        shapes["lm_head.weight"] = (vocabulary // every, HIDDEN)
        shapes["markov_head.markov_w1.weight"] = (vocabulary, markov)
        shapes["markov_head.markov_w2.weight"] = (vocabulary // every, markov)
    if confidence:
        shapes |= {"confidence_head.proj.weight": (1, confidence), "confidence_head.proj.bias": (1,)}
    tensors = random_tensors(shapes, seed=1)
    return tensors | (draft_vocabulary(vocabulary, every, seed=2) if every > 1 else {})


def dflash2_tensors(layers: int = 1, *, taps: int = 2, groups: int = 4, rank: int = 6) -> Any:
    """Those of a DFlash drafter, with convolutions and a selector."""
    shapes: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (rank, HIDDEN)}
    for name in ("predecessor", "successor"):
        shapes[f"candidate_selector.{name}_codebook"] = (VOCABULARY, rank)
    for index in range(layers):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{index}.{name}.base_kernel"] = (2, taps, HIDDEN)
            shapes[f"layers.{index}.{name}.kernel_projection.weight"] = (2 * taps * groups, HIDDEN)
    return tensors_of(layers=layers) | random_tensors(shapes, seed=4)


def zlab_config(layers: int = 1, **others: Any) -> dict[str, Any]:
    ids = {"target_layer_ids": [1, 2, 4]} | others
    nested = {"mask_token_id": MASK} | {name: value for name, value in ids.items() if value is not None}
    keys = layer_keys(block_size=BLOCK, layer_types=["full_attention"] * layers, num_hidden_layers=layers)
    return keys | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}


def speculators_config(layers: int = 1, kind: str = "dflash", **others: Any) -> dict[str, Any]:
    keys = layer_keys(vocab_size=VOCABULARY, model_type="qwen3", layer_types=["full_attention"] * layers)
    own = {"block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [2, 3, 4]}
    return {"speculators_model_type": kind, "transformer_layer_config": keys} | own | others


def built(folder: Path, target: Any, name: str) -> DFlash:
    """The drafter of a folder, whose format must be recognised by this name."""
    checkpoint = read_checkpoint(locate(str(folder), print))
    assert checkpoint is not None
    row = format_of(checkpoint)
    assert row is not None and row.name == name
    drafter = row.load(checkpoint, target)
    assert isinstance(drafter, DFlash)
    return drafter
