"""The table of drafter formats: how each is recognised by its config and tensors, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.dflash import is_dflash, is_dspark_drafter, load_dflash
from utils.drafter_formats.eagle3 import is_eagle3, load_eagle3
from utils.models.feature_drafter import FeatureDrafter


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """A row of the table. recognises: whether a checkpoint has this format. load: build the drafter of a target."""

    name: str
    recognises: Callable[[DrafterCheckpoint], bool]
    load: Callable[[DrafterCheckpoint, PreTrainedModel], FeatureDrafter]


# The first row that applies is used, so the specific ones come first.
FORMATS = (
    DrafterFormat("EAGLE-3", is_eagle3, load_eagle3),
    DrafterFormat("DSpark", is_dspark_drafter, load_dflash),
    DrafterFormat("DFlash", is_dflash, load_dflash),
)


def format_of(checkpoint: DrafterCheckpoint) -> DrafterFormat | None:
    """The format of a checkpoint, or None if it is a model or is not known."""
    return next((row for row in FORMATS if row.recognises(checkpoint)), None)
