"""Identifies a target by its sizes and a sample of its weights."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Number formats move a fingerprint by less than this share of its norm; different models are further apart.
FINGERPRINT_TOLERANCE = 0.02


def target_sizes(target: PreTrainedModel) -> list[int]:
    """Return the vocabulary size, hidden size and number of blocks of a target."""
    config = target.config.get_text_config(decoder=True)
    return [*target.get_input_embeddings().weight.shape, int(config.num_hidden_layers)]


def fingerprint(target: PreTrainedModel) -> Tensor:
    """Return numbers (N,) that identify a target in any number format, sampled from its embedding and its norms.

    These are never quantized. A target that was fine-tuned without changing them counts as the same.
    """
    embedding = target.get_input_embeddings().weight.detach()
    rows = torch.linspace(0, embedding.shape[0] - 1, 64, device=embedding.device).long()
    norms = [
        part.detach()[:8] for name, part in sorted(target.named_parameters()) if part.dim() == 1 and "norm" in name
    ]
    parts = [embedding[rows, :16].float().flatten(), *([torch.cat(norms).float()] if norms else [])]
    # Embedding and norms have different scales. Normalised, both count the same.
    return torch.cat([(part / part.norm().clamp(min=1e-12)).cpu() for part in parts])


def is_same_target(target: PreTrainedModel, sizes: list[int], stored: Tensor) -> bool:
    """Whether these are the sizes and the fingerprint (N,) of the target. Raises ValueError if it is not finite."""
    # NaN and infinity would make the comparison below meaningless.
    if not stored.isfinite().all():
        raise ValueError("fingerprint")
    own = fingerprint(target)
    if target_sizes(target) != sizes or own.shape != stored.shape:
        return False
    return bool((own - stored).norm() <= FINGERPRINT_TOLERANCE * stored.norm())
