"""The table of drafter formats: how each is recognised by its config and tensors, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.dflash import is_dflash, is_dspark_drafter, load_dflash
from utils.drafter_formats.eagle1 import is_eagle1, load_eagle1
from utils.drafter_formats.eagle3 import is_eagle3, load_eagle3
from utils.drafter_formats.eagle3_conventions import is_ambiguous
from utils.drafter_formats.gemma4 import is_gemma4_assistant, load_gemma4_assistant
from utils.drafter_formats.medusa import is_medusa, load_medusa
from utils.drafter_formats.mtp import is_mtp, load_published_mtp
from utils.drafter_formats.peagle import is_peagle, load_peagle
from utils.drafter_formats.relatives import refuse_relatives
from utils.models.feature_drafter import FeatureDrafter


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """A row of the table. recognises: whether a checkpoint has this format. load: build the drafter of a target.
    is_ambiguous: whether programs disagree about how to read this checkpoint.
    """

    name: str
    recognises: Callable[[DrafterCheckpoint], bool]
    load: Callable[[DrafterCheckpoint, PreTrainedModel], FeatureDrafter]
    is_ambiguous: Callable[[DrafterCheckpoint], bool] = lambda checkpoint: False


# The first row that applies is used, so the specific ones come first.
FORMATS = (
    DrafterFormat("P-EAGLE", is_peagle, load_peagle, is_ambiguous),
    DrafterFormat("EAGLE-3", is_eagle3, load_eagle3, is_ambiguous),
    DrafterFormat("EAGLE", is_eagle1, load_eagle1),
    DrafterFormat("DSpark", is_dspark_drafter, load_dflash),
    DrafterFormat("DFlash", is_dflash, load_dflash),
    DrafterFormat("Medusa", is_medusa, load_medusa),
    DrafterFormat("MTP", is_mtp, load_published_mtp),
    DrafterFormat("Gemma-4-assistant", is_gemma4_assistant, load_gemma4_assistant),
)


def format_of(checkpoint: DrafterCheckpoint) -> DrafterFormat | None:
    """The format of a checkpoint, or None if it is a model. Raises UserError for a drafter that is not supported."""
    known = next((row for row in FORMATS if row.recognises(checkpoint)), None)
    if known is None:
        refuse_relatives(checkpoint, [row.name for row in FORMATS])
    return known
