"""Models whose weights stay in safetensors files, and files that are changed."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_llama, tiny_tokenizer
from tiny_gguf import write_gguf
from transformers import PreTrainedModel

from utils.engine.stored_weights import in_files
from utils.models.checkpoints import load_model
from utils.models.memory import Placement
from utils.models.sources import Source


def from_files(folder: Path, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Any:
    """A model that was saved in a folder and loaded from there, with its linear weights left in the files."""
    model.save_pretrained(folder)
    return loaded(folder, dtype)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, *, stays: bool = True) -> Any:
    """stays: whether the weights must be left in the files."""
    model = load_model(Source(str(folder), folder.name), "none", Placement("cpu", dtype, lambda text: None))
    assert in_files(model) == stays
    return model


def overwrite(path: Path, content: bytes) -> None:
    """Change a file in place, and keep its size and the time of its last change."""
    status = path.stat()
    assert len(content) == status.st_size
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def changed_bytes(path: Path, name: str) -> bytes:
    """The content of a safetensors file with one tensor negated."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    first, last = json.loads(content[8 : 8 + size])[name]["data_offsets"]
    weight = torch.frombuffer(content, dtype=torch.float32, count=(last - first) // 4, offset=8 + size + first)
    weight.neg_()
    return bytes(content)


def write_wide_gguf_of(path: Path, seed: int) -> Path:
    """Like `write_wide_gguf`, of another model of the same size."""
    model = tiny_llama(seed, vocab_size=300, hidden_size=64, intermediate_size=256)
    return write_gguf(path, model, tiny_tokenizer())
