"""Draft heads as folders: weights in safetensors, shape and target in JSON, and a model card.

A head fits only one target. The target is recognised by a sample of its weights, not by its name, because folders are
moved and renamed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from utils.errors import UserError
from utils.files import check_regular, os_reason, replacing
from utils.models.checkpoints import check_finite
from utils.models.draft_head import DraftHeadShape, Head, TargetHead

FORMAT, VERSION = "speculative head", 1
CONFIG, WEIGHTS = "head.json", "model.safetensors"
REMEDY = "make one for it with `python -m sampling.distill`"
# Number formats move a fingerprint by less than this share of its norm; different models are further apart.
FINGERPRINT_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class HeadFile:
    """What a folder stores: the head, the token ids (V',) it drafts, and its target's name, sizes and fingerprint."""

    head: Head
    vocabulary: Tensor
    target: str
    size: list[int]
    fingerprint: Tensor

    @classmethod
    def of(cls, head: Head, vocabulary: Tensor, target: PreTrainedModel) -> HeadFile:
        """Describe a head of this target. `vocabulary` (V',) has ascending ids."""
        return cls(head, vocabulary, target.name_or_path, target_sizes(target), fingerprint(target))


def save_head(folder: Path, file: HeadFile) -> None:
    """Write a head with weights in bfloat16. Raises UserError if the folder cannot be written."""
    tensors = {
        name: part.detach().to("cpu", torch.bfloat16).contiguous() for name, part in file.head.state_dict().items()
    }
    # "mark" is the name of the fingerprint in the file format.
    tensors |= {"vocabulary": file.vocabulary.to("cpu", torch.int32), "mark": file.fingerprint.cpu()}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "target": file.target,
        "size": file.size,
        "shape": asdict(file.head.shape),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as weights:
            weights.write(save(tensors))
        # Last, because a folder with this file counts as a head.
        with replacing(folder / CONFIG) as config:
            config.write((json.dumps(about, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({os_reason(error)}): choose a different folder.") from error


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head rather than a model."""
    return (folder / CONFIG).is_file()


def load_head(folder: Path, target: PreTrainedModel) -> TargetHead:
    """Load a head onto its target, in the target's number format. Raises UserError as `read_head` does."""
    head, vocabulary = read_head(folder, target)
    return TargetHead(head, target, vocabulary)


def read_head(folder: Path, target: PreTrainedModel) -> tuple[Head, Tensor]:
    """Read a head in float32 and the token ids (V',) it drafts.

    Raises UserError if the folder holds no readable head, or that of a different target.
    """
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise UserError(f"The head in {folder} has a format or version that is not supported: {REMEDY}.")
        check_regular(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            # safe_open is not a mapping, so it can only be iterated through keys().
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        vocabulary, stored = parts.pop("vocabulary"), parts.pop("mark")
        # Before the head is built, so that a head of a different size is reported as one of a different target.
        _check_target(target, stored, about, folder)
        shape = DraftHeadShape(**about["shape"] | {"layers": tuple(about["shape"]["layers"])})
        size, _, blocks = target_sizes(target)
        # Hidden states are numbered from 0, the embeddings, to the number of blocks, or from the end.
        layers_fit = all(-blocks - 1 <= layer <= blocks for layer in shape.layers)
        # Rotary embeddings need an even size per head.
        if not layers_fit or shape.hidden % (2 * shape.heads) or not 0 < shape.theta < inf:
            raise ValueError("shape")
        _check_vocabulary(vocabulary, size)
        head = _head(shape, parts)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {os_reason(error)}.") from error
    except Exception as error:  # whatever damaged files lead to
        raise UserError(f"{folder} holds no readable head: fetch it again, or {REMEDY}.") from error
    check_finite(head, str(folder))
    return head, vocabulary.long()


def _head(shape: DraftHeadShape, parts: dict[str, Tensor]) -> Head:
    """Build a head with these weights. Raises ValueError or RuntimeError if they are not those of the shape."""
    # Without memory first: a damaged shape could ask for more than the machine has.
    with torch.device("meta"):
        expected = {name: part.shape for name, part in Head(shape).state_dict().items()}
    if {name: part.shape for name, part in parts.items()} != expected:
        raise ValueError("shapes")
    head = Head(shape)
    head.load_state_dict({name: part.float() for name, part in parts.items()})
    return head


def _check_vocabulary(vocabulary: Tensor, size: int) -> None:
    """Raise ValueError unless these are ascending token ids below `size`."""
    if vocabulary.dtype not in (torch.int32, torch.int64) or vocabulary.dim() != 1 or not len(vocabulary):
        raise ValueError("vocabulary")
    ascending = bool((vocabulary.diff() > 0).all())
    if not ascending or int(vocabulary[0]) < 0 or int(vocabulary[-1]) >= size:
        raise ValueError("vocabulary")


def _check_target(target: PreTrainedModel, stored: Tensor, about: dict[str, Any], folder: Path) -> None:
    if not is_same_target(target, about["size"], stored):
        name = " ".join(str(about["target"]).split())[:80]
        raise UserError(f"The head in {folder} reads the hidden states of {name}, which is not this target: {REMEDY}.")


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
