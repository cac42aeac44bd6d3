"""The table of drafter formats: how each is recognised by its config and tensors, and how it is loaded.

Drafters that look like models, but have a format that is not supported, are refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.dflash import is_dflash, is_dflash2, is_dspark, load_dflash
from utils.drafter_formats.eagle3 import is_eagle3, is_peagle, load_eagle3, load_peagle
from utils.drafter_formats.gemma4 import is_gemma4_assistant, load_gemma4_assistant
from utils.errors import UserError
from utils.models.feature_drafter import FeatureDrafter

ASSISTANT = "_assistant"  # ends the model types of drafters with a class in transformers


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """A row of the table. `recognises` returns whether a checkpoint has this format, and `load` builds the drafter."""

    name: str
    recognises: Callable[[DrafterCheckpoint], bool]
    load: Callable[[DrafterCheckpoint, PreTrainedModel], FeatureDrafter]


# The first row that applies is used, so the specific ones come first.
FORMATS = (
    DrafterFormat("P-EAGLE", is_peagle, load_peagle),
    DrafterFormat("EAGLE-3", is_eagle3, load_eagle3),
    DrafterFormat("DFlash2", is_dflash2, load_dflash),
    DrafterFormat("DSpark", is_dspark, load_dflash),
    DrafterFormat("DFlash", is_dflash, load_dflash),
    DrafterFormat("Gemma-4-assistant", is_gemma4_assistant, load_gemma4_assistant),
)


def format_of(checkpoint: DrafterCheckpoint) -> DrafterFormat | None:
    """The format of a checkpoint, or None if it is a model. Raises UserError for a drafter that is not supported."""
    known = next((row for row in FORMATS if row.recognises(checkpoint)), None)
    if known is None and (name := _unsupported(checkpoint)):
        checkpoint.check_types()  # names of quantized tensors hide the format
        formats = ", ".join(row.name for row in FORMATS)
        raise UserError(
            f"'{checkpoint.name}' is a drafter of the format {name}, which is not supported: name a model, or a "
            f"drafter of one of the formats {formats}."
        )
    return known


def _unsupported(checkpoint: DrafterCheckpoint) -> str | None:
    """The name of an unsupported format. None if the checkpoint looks like a model."""
    if kind := checkpoint.config.get("speculators_model_type"):
        return f"speculators {kind}"
    architectures = [str(name) for name in checkpoint.config.get("architectures") or []]
    model_type = str(checkpoint.config.get("model_type"))
    if model_type.endswith(ASSISTANT) or model_type == "medusa":
        return model_type
    if "medusa_num_heads" in checkpoint.config:  # the authors' configs have no model type
        return "medusa"
    fusion = checkpoint.shapes.get("fc.weight", ())  # of EAGLE, EAGLE-2 and HASS
    is_eagle = len(fusion) == 2 and fusion[1] == 2 * fusion[0]
    return next((name for name in architectures if "eagle" in name.lower()), "EAGLE" if is_eagle else None)
