"""DFlash and DSpark drafters in the layouts of z-lab, SpecForge, DeepSpec and speculators: all drafts of a round from
one pass over a block of mask tokens (arXiv 2602.06036; arXiv 2607.05147).

DSpark adds heads: see dspark_heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from utils.decode.features import layer_count
from utils.decode.kv_cache import GrowingLayer
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.block_config import (
    BlockConfig,
    block_config,
    block_conventions,
    check_supported,
    is_dspark,
    markov_kind,
)
from utils.drafter_formats.block_layers import Tables, layer_pass
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.dspark_heads import ConfidenceHead, MarkovHead, MarkovShape, confidence_size, markov_shape
from utils.drafter_formats.eagle3 import load_exactly
from utils.drafter_formats.layer_config import layer_config
from utils.drafter_formats.target_parts import (
    DraftHead,
    load_embedding,
    load_head,
    misfit,
    share_parts,
)
from utils.models.feature_drafter import BlockDrafter, Conventions

RENAMED = {"logit_head.": ""}  # of early SpecForge files
# Tensors that are not those of the module: shared parts, and the target's own, which training keeps beside them.
BESIDES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(slots=True)
class BlockCache:
    """Keys and values of the context. Of the last block: its states (K, H), and what its Markov head remembers after
    each draft.
    """

    layers: list[GrowingLayer]
    states: Tensor = field(default_factory=lambda: torch.empty(0))
    memories: list[Tensor | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that a drafter's config does not state. target_layers: of the target. feature: of a position. markov,
    confidence: of the heads; None where there is no such head.
    """

    target_layers: int
    feature: int
    markov: MarkovShape | None
    confidence: int | None


class DFlash(BlockDrafter):
    """A DFlash drafter, or with a Markov head or a confidence head a DSpark drafter. config: of its layers, with the
    target's vocabulary size.
    """

    embed_tokens: nn.Module
    lm_head: DraftHead
    rotary: nn.Module

    def __init__(self, config: Any, block: BlockConfig, conventions: Conventions, sizes: Sizes) -> None:
        super().__init__()
        self.config, self.block, self.conventions, self.sizes = config, block, conventions, sizes
        self.target_layers, self.doubtful = sizes.target_layers, ("from_anchor",) if block.slots > 1 else ()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(sizes.feature, hidden, bias=False)
        self.hidden_norm, self.norm = LlamaRMSNorm(hidden, eps), LlamaRMSNorm(hidden, eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.markov_head = MarkovHead(sizes.markov) if sizes.markov else None
        self.confidence_head = ConfidenceHead(sizes.confidence) if sizes.confidence else None

    @property
    def block_size(self) -> int:  # type: ignore[override]  # it depends on a convention that can be corrected
        return self.block.slots - (not self.conventions.from_anchor)

    def new_cache(self) -> BlockCache:
        return BlockCache([GrowingLayer() for _ in self.layers])

    def block_logits(self, features: Tensor, tokens: Tensor, first: int, cache: BlockCache) -> Tensor:
        context = self.hidden_norm(self.fc(features))
        slots = tokens.new_full((self.block.slots,), self.block.mask_token)
        slots[0] = tokens[-1]
        states = self.embed_tokens(slots).to(context.dtype)
        positions = torch.arange(first, first + len(features) + len(slots), device=features.device)
        tables = Tables(*(table[0] for table in self.rotary(states, positions[None])))
        for layer, kept, window in zip(self.layers, cache.layers, self.block.windows, strict=True):
            states = layer_pass(layer, states, context, tables, kept=kept, window=window)
        cache.states, cache.memories = self.norm(states)[-self.block_size :], []
        logits: Tensor = self.lm_head(cache.states)
        return logits

    def conditioned(self, logits: Tensor, index: int, previous: int, cache: BlockCache) -> Tensor:
        if self.markov_head is None:
            return logits
        memory = cache.memories[index - 1] if index else None
        bias, memory = self.markov_head.bias(previous, cache.states[index : index + 1], memory)
        cache.memories[index:] = [memory]
        return logits + self.lm_head.over_target(bias)

    def confidence(self, index: int, previous: int, cache: BlockCache) -> float | None:
        if self.confidence_head is None:
            return None
        known = cache.states[index : index + 1]
        if self.confidence_head.size > known.shape[-1]:
            assert self.markov_head is not None
            known = torch.cat([known, self.markov_head.before(previous)], dim=-1)
        probability: float = self.confidence_head(known)
        return probability


def is_dflash(checkpoint: DrafterCheckpoint) -> bool:
    """Whether it belongs to the family: features enter through `fc` and a norm of their own, before plain layers."""
    has_parts = checkpoint.has("fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight")
    return has_parts and len(checkpoint.shapes["fc.weight"]) == 2


def is_dspark_drafter(checkpoint: DrafterCheckpoint) -> bool:
    """Whether it belongs to the family and has, or is named as if it had, heads of DSpark."""
    checkpoint = checkpoint.renamed(RENAMED)
    return is_dflash(checkpoint) and is_dspark(checkpoint)


def load_dflash(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> DFlash:
    """Build the drafter. Raises UserError if its tensors do not fit its config or the target."""
    checkpoint = checkpoint.renamed(RENAMED)
    check_supported(checkpoint)
    block = block_config(checkpoint, target)
    config = layer_config(checkpoint.layer_keys, checkpoint, head_norms=True)
    config.vocab_size = vocabulary_size(target)
    markov = markov_shape(checkpoint, markov_kind(checkpoint))
    sizes = Sizes(layer_count(target), checkpoint.shapes["fc.weight"][1], markov, confidence_size(checkpoint))
    conventions = block_conventions(checkpoint, target)
    with torch.device("meta"):  # random weights would take time and memory
        drafter = DFlash(config, block, conventions, sizes)
    load_exactly(drafter, checkpoint, besides=BESIDES)
    embedding = load_embedding(checkpoint, target, config.hidden_size, scaled=True)  # as z-lab's program
    head = load_head(checkpoint, target, config.hidden_size)
    _check_heads(checkpoint, drafter, head)
    share_parts(drafter, embedding, head, target)
    return drafter


def _check_heads(checkpoint: DrafterCheckpoint, drafter: DFlash, head: DraftHead) -> None:
    """Raise UserError unless the heads of DSpark fit the vocabularies and the states."""
    sizes, inputs = drafter.sizes, [drafter.config.hidden_size]
    if (markov := sizes.markov) is not None:
        inputs.append(inputs[0] + markov.rank)
        known, drafted = f"{markov.tokens} tokens and drafts {markov.drafted}", head.rows.out_features
        if markov.tokens < head.size or markov.drafted != drafted:
            raise misfit(checkpoint, f"its Markov head knows {known}, not {head.size} and {drafted}")
    if sizes.confidence is not None and sizes.confidence not in inputs:
        raise misfit(checkpoint, f"its confidence head reads {sizes.confidence} numbers, not {inputs[-1]}")
