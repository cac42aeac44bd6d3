"""Drafters that look like models by their files, but have a format that is not supported: they are refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.errors import UserError

ASSISTANT = "_assistant"  # ends the model types of drafters with a class in transformers
LATENT = ".kv_a_proj_with_mqa.weight"  # multi-head latent attention


def refuse_relatives(checkpoint: DrafterCheckpoint, supported: Sequence[str]) -> None:
    """Raise UserError if a checkpoint that no row of the table recognises is a drafter. supported: the rows' names."""
    if name := _name(checkpoint):
        formats = ", ".join(supported)
        raise UserError(
            f"'{checkpoint.name}' is a drafter of the format {name}, which is not supported: name a model, or a "
            f"drafter of one of the formats {formats}."
        )


def _name(checkpoint: DrafterCheckpoint) -> str | None:
    """The name of an unsupported format. None if the checkpoint looks like a model."""
    architectures = [str(name) for name in checkpoint.config.get("architectures") or []]
    eagle = next((name for name in architectures if "eagle" in name.lower()), None)
    latent = any(name.endswith(LATENT) for name in checkpoint.shapes)
    if eagle and latent:
        return f"{eagle} with multi-head latent attention"
    if kind := checkpoint.config.get("speculators_model_type"):
        return f"speculators {kind}"
    if eagle is None and (model_type := str(checkpoint.config.get("model_type"))).endswith(ASSISTANT):
        return model_type
    return eagle
