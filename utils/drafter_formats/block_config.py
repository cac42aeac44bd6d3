"""What the config of a DFlash or DSpark checkpoint says of its blocks, and which of their relatives are not supported.

Keys stand at the top level or under `dflash_config`. Layer ids are outputs of layers in `target_layer_ids` (z-lab,
SpecForge, DeepSpec), and hidden states in `aux_hidden_state_layer_ids` (speculators).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from utils.decode.features import layer_count
from utils.decode.model_info import vocabulary_size
from utils.drafter_formats.block_layers import Window
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.dspark_heads import MARKOV_KINDS
from utils.drafter_formats.layer_types import sliding_sizes
from utils.drafter_formats.target_parts import check_feature_layers
from utils.errors import UserError
from utils.models.feature_drafter import Conventions

SPECULATORS = "speculators_model_type"
TYPES = ("dflash", "dspark")
FROM_ANCHOR = "sample_from_anchor"
MOST_SLOTS = 1024  # published blocks have 7 to 16
# Beginnings of names of tensors that only these have.
RELATIVES = {
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "candidate_selector.": "DFlash2",
    "refiner_head.": "XPress",
}


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """slots: tokens of a block, of which the first is the last known one and the others are mask tokens. windows: of
    the layers with sliding attention; None for the others.
    """

    slots: int
    mask_token: int
    windows: tuple[Window | None, ...]


def block_config(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> BlockConfig:
    """Read it. Raises UserError for keys that are missing or not usable."""
    slots = _number(checkpoint, "block_size", 1 if _from_anchor(checkpoint) else 2, MOST_SLOTS)
    mask_token = _number(checkpoint, "mask_token_id", 0, vocabulary_size(target) - 1)
    return BlockConfig(slots, mask_token, _windows(checkpoint))


def block_conventions(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Conventions:
    """The conventions that the checkpoint declares, or the usual ones. Raises UserError for unusable layers."""
    return Conventions(_feature_layers(checkpoint, target), from_anchor=_from_anchor(checkpoint))


def _from_anchor(checkpoint: DrafterCheckpoint) -> bool:
    declared = setting(checkpoint, FROM_ANCHOR)
    if declared is not None and not isinstance(declared, bool):
        raise checkpoint.unusable(FROM_ANCHOR, declared, "true or false")
    return is_dspark(checkpoint) if declared is None else declared


def setting(checkpoint: DrafterCheckpoint, key: str) -> Any:
    """A key of the config, at the top level or under `dflash_config`; None if it is in neither."""
    found, nested = checkpoint.config.get(key), checkpoint.config.get("dflash_config")
    return nested.get(key) if found is None and isinstance(nested, dict) else found


def is_dspark(checkpoint: DrafterCheckpoint) -> bool:
    """Whether it is a DSpark checkpoint: by its tensors, or by name if it has neither of the optional heads."""
    names = [checkpoint.config.get(name) for name in (SPECULATORS, "architectures")]
    names.append(setting(checkpoint, "projector_type"))
    has_head = any(name.startswith(("markov_head.", "confidence_head.")) for name in checkpoint.shapes)
    return has_head or any("dspark" in str(name).lower() for name in names)


def check_supported(checkpoint: DrafterCheckpoint) -> None:
    """Raise UserError for relatives of DFlash that compute something else."""
    declared = [checkpoint.config.get(SPECULATORS), setting(checkpoint, "projector_type")]
    found = next((str(name) for name in declared if name and str(name).lower() not in TYPES), None)
    found = found or next(
        (RELATIVES[old] for old in RELATIVES for name in checkpoint.shapes if name.startswith(old)), None
    )
    if found:
        raise _unsupported(checkpoint, f"is a drafter of the kind {found}")
    if checkpoint.has("layers.0.pre_feedforward_layernorm.weight"):
        raise _unsupported(checkpoint, "has layers of Gemma")


def markov_kind(checkpoint: DrafterCheckpoint) -> str | None:
    """The declared kind of the Markov head, None if none is declared. Raises UserError for an unknown one."""
    kind = setting(checkpoint, "markov_head_type")
    if kind is None or str(kind).lower() in MARKOV_KINDS:
        return kind if kind is None else str(kind).lower()
    raise _unsupported(checkpoint, f"has a Markov head of the kind {kind}")


def _unsupported(checkpoint: DrafterCheckpoint, what: str) -> UserError:
    return UserError(
        f"'{checkpoint.name}' {what}, which is not supported: name a DFlash or DSpark drafter with Qwen3 layers."
    )


def _number(checkpoint: DrafterCheckpoint, key: str, lowest: int, highest: int) -> int:
    value = setting(checkpoint, key)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        given = "no" if value is None else f"{value!r:.40} as"
        raise UserError(
            f"'{checkpoint.name}' has {given} {key} in its config.json, and a block needs a whole number from {lowest}"
            f" to {highest}."
        )
    return value


def _feature_layers(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> tuple[int, ...]:
    """The hidden states that the drafter reads."""
    count, states = layer_count(target), _layer_ids(checkpoint, "aux_hidden_state_layer_ids")
    outputs = _layer_ids(checkpoint, "target_layer_ids")
    if states:
        ids = states
    elif outputs:
        ids = [layer + 1 for layer in outputs]
    else:
        made_for = setting(checkpoint, "num_target_layers")
        ids = _default_ids(made_for if isinstance(made_for, int) else count, checkpoint.layer_count())
    check_feature_layers(checkpoint, target, ids)
    # As their own programs read the last layer: vLLM before the final norm, transformers after it.
    return tuple(count + 1 if states and layer == count else layer for layer in ids)


def _layer_ids(checkpoint: DrafterCheckpoint, key: str) -> list[int]:
    return checkpoint.whole_numbers(key, setting(checkpoint, key))


def _default_ids(layers: int, drafter_layers: int) -> list[int]:
    """As z-lab spreads them: as many as the drafter has layers, from the output of layer 1 to that of n - 3."""
    if drafter_layers == 1:
        return [layers // 2 + 1]
    return [round(1 + index * (layers - 4) / (drafter_layers - 1)) + 1 for index in range(drafter_layers)]


def _windows(checkpoint: DrafterCheckpoint) -> tuple[Window | None, ...]:
    moves = SPECULATORS not in checkpoint.config
    causal = moves or not checkpoint.flag("sliding_window_non_causal")
    sizes = sliding_sizes(checkpoint)
    return tuple(None if size is None else Window(size, moves=moves, causal=causal) for size in sizes)
