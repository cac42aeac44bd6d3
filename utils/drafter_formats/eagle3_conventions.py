"""The conventions of EAGLE-3 checkpoints: which hidden states they read, by the keys of several programs."""

from __future__ import annotations

from transformers import PreTrainedModel

from utils.decode.features import layer_count
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.target_parts import check_feature_layers
from utils.models.feature_drafter import Conventions

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def conventions(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> Conventions:
    """The conventions that the checkpoint declares, or the usual ones. Raises UserError for unusable layers."""
    before_residual = checkpoint.flag("norm_before_residual")
    if before_residual is None:  # speculators files without the key are read so by vLLM
        before_residual = "speculators_model_type" in checkpoint.config
    return Conventions(_feature_layers(checkpoint, target), before_residual, bool(checkpoint.flag("norm_output")))


def _feature_layers(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> tuple[int, ...]:
    """The hidden states that the drafter reads. Programs number them as inputs or as outputs of layers."""
    config, count = checkpoint.config, layer_count(target)
    nested = checkpoint.whole_numbers(LAYER_IDS, checkpoint.part("eagle_config").get(LAYER_IDS))
    outputs = checkpoint.whole_numbers("target_layer_ids", config.get("target_layer_ids"))
    ids = checkpoint.whole_numbers(LAYER_IDS, config.get(LAYER_IDS))  # speculators, vLLM: hidden states
    if not ids and nested:  # SGLang: outputs of layers if the first one is 1
        ids = [layer + (nested[0] == 1) for layer in nested]
    elif not ids and outputs:  # DeepSpec: outputs of layers
        ids = [layer + 1 for layer in outputs]
    elif not ids:
        ids = [2, count // 2, count - 3]
    check_feature_layers(checkpoint, target, ids)
    # These programs take the last layer's output before the final norm, which has number n + 1 here.
    return tuple(count + 1 if layer == count else layer for layer in ids)


def head_norm_doubtful(checkpoint: DrafterCheckpoint) -> bool:
    """Whether the output head may read states before the final norm: so `norm_output` false is to SpecForge 0.2, and in
    SGLang it is about the states that are fed back.
    """
    return checkpoint.flag("norm_output") is False and "speculators_model_type" not in checkpoint.config


def is_ambiguous(checkpoint: DrafterCheckpoint) -> bool:
    """Whether programs read the config of such an EAGLE-3 checkpoint in different ways."""
    config = checkpoint.config
    nested = checkpoint.part("eagle_config").get(LAYER_IDS)
    counts_unsaid = bool(nested) and not config.get(LAYER_IDS)  # as inputs or as outputs of layers
    is_speculators = "speculators_model_type" in config
    residual_unsaid = is_speculators and config.get("norm_before_residual") is None
    # SpecForge until September 2026 wrote true for drafters that were trained with false, and false for others.
    output_doubtful = "norm_output" in config and not is_speculators
    return counts_unsaid or residual_unsaid or output_doubtful
