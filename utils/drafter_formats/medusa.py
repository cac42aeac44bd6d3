"""Medusa heads in the layouts of FasterDecoding and of vLLM, as a chain of drafts (Cai et al. 2024, arXiv 2401.10774).

Head i reads the target's last known hidden state, of position t, and predicts the token at position t + 2 + i. The
tree of candidates and the approximate acceptance of the paper are left out: every rule of this program is exact.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig, PreTrainedModel

from utils.decode.features import layer_count
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.checkpoint import TOKEN_MAP, DrafterCheckpoint
from utils.drafter_formats.eagle3 import load_exactly
from utils.drafter_formats.target_parts import load_head, misfit
from utils.errors import UserError
from utils.models.feature_drafter import BlockDrafter, Conventions

PREFIXES = {"medusa_head.": "", "medusa_heads.": ""}  # of exports of whole models, and of files for vLLM
NUMBERED = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(?:weight|bias)")  # head, layer: FasterDecoding
UNUSED_MAP = "unused_token_map"


class ResidualBlock(nn.Module):
    """Layers of a head: x + SiLU(W x + b) each."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + silu(layer(x))
        return x


class Medusa(BlockDrafter):
    """One block and one output head for each draft. `scale` is a factor of the logits.

    `config` has the target's vocabulary size. `target_layers` is the number of the target's layers.
    """

    lm_heads: nn.ModuleList  # one for each block, or one for all

    def __init__(self, blocks: list[ResidualBlock], config: PreTrainedConfig, target_layers: int, scale: float) -> None:
        super().__init__()
        self.blocks, self.block_size = nn.ModuleList(blocks), len(blocks)
        self.config, self.target_layers, self.scale = config, target_layers, scale
        self.conventions = Conventions((target_layers,))

    def new_cache(self) -> None:
        return None

    def block_logits(self, features: Tensor, tokens: Tensor, first: int, cache: None) -> Tensor:
        # The last known feature is that of the token before the last one, so head 0 predicts what follows the context.
        last, single = features[-1:], len(self.lm_heads) == 1
        rows = [self.lm_heads[0 if single else index](block(last)) for index, block in enumerate(self.blocks)]
        return torch.cat(rows) * self.scale


def is_medusa(checkpoint: DrafterCheckpoint) -> bool:
    """Whether it has the numbered heads of either layout, and no decoder layers beside them."""
    checkpoint = _with_common_names(checkpoint)
    numbered = checkpoint.has("lm_heads.0.weight") or checkpoint.has("blocks.0.layers.0.weight")
    return numbered and checkpoint.layer_count() == 0


def load_medusa(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Medusa:
    """Build the drafter. Raises UserError if its tensors do not fit each other or the target."""
    checkpoint = _with_common_names(checkpoint)
    size = int(target.config.get_text_config(decoder=True).hidden_size)
    _check_input(checkpoint, size)
    heads, shared = checkpoint.layer_count("lm_heads."), bool(checkpoint.config.get("original_lm_head"))
    # Counted, because the number in the config is not always that of the heads in the file.
    count = max(heads, checkpoint.layer_count("blocks."))
    if heads != count and not shared:
        raise UserError(f"'{checkpoint.name}' has {heads} output heads for {count} blocks: fetch or copy it again.")
    # The most of any block, so that a layer that one of them lacks is reported.
    layers = max((checkpoint.layer_count(f"blocks.{index}.layers.") for index in range(count)), default=0)
    blocks = [ResidualBlock(size, layers) for _ in range(count)]
    config = PreTrainedConfig(vocab_size=vocabulary_size(target))
    drafter = Medusa(blocks, config, layer_count(target), _scale(checkpoint))
    names = [name for name in checkpoint.shapes if name.startswith("lm_heads.")]
    load_exactly(drafter, checkpoint, besides=(*names, TOKEN_MAP, UNUSED_MAP))
    views = [checkpoint.renamed({f"lm_heads.{index}.": "lm_head."}) for index in range(1 if shared else count)]
    drafter.lm_heads = nn.ModuleList(load_head(view, target, size) for view in views)
    drafter.to(target.device, target.dtype).eval().requires_grad_(False)
    drafter.device, drafter.dtype = target.device, target.dtype
    return drafter


def _check_input(checkpoint: DrafterCheckpoint, size: int) -> None:
    """Raise UserError unless the heads read hidden states of this size, and a smaller vocabulary has its ids."""
    names = ("blocks.0.layers.0.weight", "lm_heads.0.weight")
    read = next(checkpoint.shapes[name][-1] for name in names if checkpoint.has(name))
    if read != size:
        raise misfit(checkpoint, f"its heads read {read} numbers, and the target's hidden states have {size}")
    if _is_truncated(checkpoint) and not checkpoint.has(TOKEN_MAP):
        raise UserError(f"'{checkpoint.name}' has a truncated vocabulary but no {TOKEN_MAP}: fetch or copy it again.")


def _scale(checkpoint: DrafterCheckpoint) -> float:
    scale = checkpoint.config.get("logit_scale", 1.0)
    if not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        raise UserError(f"'{checkpoint.name}' has {scale!r} as logit_scale in its config.json, not a number above 0.")
    return float(scale)


def _with_common_names(checkpoint: DrafterCheckpoint) -> DrafterCheckpoint:
    """The same checkpoint with the names of vLLM's layout."""
    checkpoint = checkpoint.renamed(PREFIXES)
    names: dict[str, str] = {}
    for name in checkpoint.shapes:
        if match := NUMBERED.fullmatch(name):
            head, layer, hidden = match.groups()
            old = f"{head}.{layer}.linear." if hidden else f"{head}.{layer}."
            names[old] = f"blocks.{head}.layers.{layer}." if hidden else f"lm_heads.{head}."
    checkpoint = checkpoint.renamed(names)
    return checkpoint if _is_truncated(checkpoint) else checkpoint.renamed({TOKEN_MAP: UNUSED_MAP})


def _is_truncated(checkpoint: DrafterCheckpoint) -> bool:
    """Whether drafts come from the ids of the token map. vLLM ignores a map if the config names no smaller
    vocabulary.
    """
    kept, whole = (checkpoint.config.get(key) for key in ("truncated_vocab_size", "vocab_size"))
    rows, ids = checkpoint.shapes.get("lm_heads.0.weight", (0,))[:1], checkpoint.shapes.get(TOKEN_MAP)
    return rows == ids or (isinstance(kept, int) and (not isinstance(whole, int) or kept < whole))
