"""target.json beside a drafter in a published format: which target it was trained for, and on how much of its text.

The formats themselves only have the target's name. This file has a sample of its weights, because a drafter of another
target with the same sizes gives correct text and no speed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.errors import UserError
from utils.files import read_text, replacing
from utils.models.target_identity import fingerprint, is_same_target, target_sizes

NAME, VERSION = "target.json", 1
REMEDY = "name a drafter of this target, or train one with `python -m sampling.distill`"


def write_target_file(folder: Path, target: PreTrainedModel, ids: Tensor, counts: Tensor) -> None:
    """Describe the target of the drafter in a folder.

    ids: its draft vocabulary (V',). counts: how often each token occurs in the text that it was trained on (V,).
    """
    about = {
        "version": VERSION,
        "target": target.name_or_path,
        "size": target_sizes(target),
        "fingerprint": [round(number, 6) for number in fingerprint(target).tolist()],
        "tokens": int(counts.sum()),
        "draft_token_counts": counts[ids.to(counts.device)].tolist(),
    }
    with replacing(folder / NAME) as file:
        file.write((json.dumps(about) + "\n").encode())


def check_target_file(checkpoint: DrafterCheckpoint, target: PreTrainedModel) -> None:
    """Raise UserError if a file beside the weights says that they belong to a different target, or is damaged."""
    path = next((path for path, _ in checkpoint.files.values()), Path()).parent / NAME
    if not path.is_file():
        return
    try:
        about: dict[str, Any] = json.loads(read_text(path))
        if about["version"] != VERSION:
            return  # of a newer program
        same = is_same_target(target, about["size"], torch.tensor(about["fingerprint"], dtype=torch.float32))
        name = " ".join(str(about["target"]).split())[:80]
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"{path} is damaged: fetch it again, or delete it to load the drafter unchecked.") from error
    if not same:
        raise UserError(f"'{checkpoint.name}' was trained for {name}, which is not this target: {REMEDY}.")
