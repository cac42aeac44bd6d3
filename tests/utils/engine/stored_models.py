"""Models whose weights stay in safetensors files, and files that are changed."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from utils.engine.stored_weights import in_files
from utils.models.checkpoints import load_model
from utils.models.devices import Placement
from utils.models.sources import Source


def from_files(folder: Path, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Any:
    """A model that was saved in a folder and loaded from there, with its linear weights left in the files."""
    model.save_pretrained(folder)
    return loaded(folder, dtype)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = load_model(Source(str(folder), folder.name), "none", Placement("cpu", dtype, lambda text: None))
    assert in_files(model)
    return model


def overwrite(path: Path, content: bytes) -> None:
    """Change a file in place, and keep its size and the time of its last change."""
    status = path.stat()
    assert len(content) == status.st_size
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
