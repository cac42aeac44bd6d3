"""Heads as folders: weights in safetensors, their shape and their target's name in JSON, and the card that their maker wrote.

A head fits one target. Which one is told by a sample of the target's numbers, not by its name: folders are moved and renamed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from utils.errors import UserError
from utils.models.draft_head import Grafted, Head, HeadShape

FORMAT, VERSION = "speculative head", 1
CONFIG, WEIGHTS = "head.json", "model.safetensors"
REMEDY = "make one for it with `python -m sampling.distill`"


@dataclass(frozen=True, slots=True)
class HeadFile:
    """vocabulary: the ids (V',) that it drafts, ascending. target: the name of the target it reads; size, mark: what tells that one."""

    head: Head
    vocabulary: Tensor
    target: str
    size: list[int]
    mark: Tensor

    @classmethod
    def of(cls, head: Head, vocabulary: Tensor, target: Any) -> HeadFile:
        return cls(head, vocabulary, target.name_or_path, target_size(target), fingerprint(target))


def save_head(folder: Path, made: HeadFile) -> None:
    """Write a head, weights in bfloat16. Raises UserError where the folder cannot be written."""
    tensors = {
        name: part.detach().to("cpu", torch.bfloat16).contiguous() for name, part in made.head.state_dict().items()
    }
    tensors |= {"vocabulary": made.vocabulary.to("cpu", torch.int32), "mark": made.mark.cpu()}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "target": made.target,
        "size": made.size,
        "shape": asdict(made.head.shape),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / f"{WEIGHTS}.part")
        os.replace(folder / f"{WEIGHTS}.part", folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}. Choose another place."
        ) from error


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head, as opposed to a model of its own."""
    return (folder / CONFIG).is_file()


def load_head(folder: Path, target: Any) -> Grafted:
    """The head in a folder, on its target and in its number format. Raises UserError as `read_head` does."""
    head, vocabulary = read_head(folder, target)
    return Grafted(head, target, vocabulary)


def read_head(folder: Path, target: Any) -> tuple[Head, Tensor]:
    """The head in a folder, in float32, and the ids (V',) it drafts. Raises UserError for a folder without one, or another target's."""
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise UserError(f"The head in {folder} has another format or version than this program reads: {REMEDY}.")
        shape = HeadShape(**about["shape"] | {"layers": tuple(about["shape"]["layers"])})
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        vocabulary, mark = parts.pop("vocabulary").long(), parts.pop("mark")
        _check_target(target, mark, about, folder)
        head = Head(shape)
        head.load_state_dict({name: part.float() for name, part in parts.items()})
        return head, vocabulary
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
        raise UserError(f"{folder} holds no head that can be read: fetch it again, or {REMEDY}.") from error


def _check_target(target: Any, mark: Tensor, about: dict[str, Any], folder: Path) -> None:
    own, size = fingerprint(target), target_size(target)
    # Number formats are less than this apart, and any two models more.
    if size != about["size"] or own.shape != mark.shape or (own - mark).norm() > 0.02 * mark.norm():
        raise UserError(
            f"The head in {folder} reads the hidden states of {about['target']}, and the target is another model: {REMEDY}."
        )


def target_size(target: Any) -> list[int]:
    """Vocabulary, width and blocks of a target."""
    config = target.config.get_text_config(decoder=True)
    return [*target.get_input_embeddings().weight.shape, int(config.num_hidden_layers)]


def fingerprint(target: Any) -> Tensor:
    """Numbers (N,) that tell a target from others, whatever format its weights are in: of its embedding, and of its norms.

    What is quantized elsewhere is neither. A target that was tuned without touching these counts as the same.
    """
    embedding = target.get_input_embeddings().weight.detach()
    rows = torch.linspace(0, embedding.shape[0] - 1, 64, device=embedding.device).long()
    norms = [
        part.detach()[:8] for name, part in sorted(target.named_parameters()) if part.dim() == 1 and "norm" in name
    ]
    parts = [embedding[rows, :16].float().flatten(), *([torch.cat(norms).float()] if norms else [])]
    return torch.cat([(part / part.norm().clamp(min=1e-12)).cpu() for part in parts])
