"""A drafter's checkpoint on disk: its config, and its tensors by name, which are read only when they are needed.

Layouts differ in prefixes, so names are normalised here. Only safetensors files are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from utils.errors import UserError
from utils.models.load_errors import explained_errors, quiet
from utils.models.quantization import QuantizedWeight, is_packed, quantized_weights, unsupported, without_parts
from utils.models.sources import Source, StoredTensor, downloaded_folder, stored_tensors, weight_files

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREFIX = "model."  # some exports put it before every name
DRAFT_TO_TARGET, ORDERING = "d2t", "masked_embedding.token_ordering"
ID_TENSORS = (DRAFT_TO_TARGET, "t2d", ORDERING)  # the others are weights
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A drafter's files.

    `name` is for messages, `config` is config.json, and `shapes` are those of the tensors by name. `files` has the file
    of each tensor, and its name there. `quantized` has, by the same pairs, the weights that are dequantized when they
    are read, to the number format `dtype`.
    """

    name: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    files: Mapping[str, tuple[Path, str]]
    quantized: Mapping[tuple[Path, str], QuantizedWeight] = field(default_factory=dict, kw_only=True)
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read these tensors, or all. Raises UserError for one that is missing, damaged or not finite."""
        wanted = list(self.shapes if names is None else names)
        if missing := next((name for name in wanted if name not in self.shapes), None):
            raise UserError(f"'{self.name}' has no tensor {missing}: fetch or copy its files again.")
        read: dict[str, Tensor] = {}
        with explained_errors(self.name):
            for path in sorted({self.files[name][0] for name in wanted}):
                with safe_open(path, framework="pt") as file:
                    for name in wanted:
                        if self.files[name][0] == path:
                            weight = self.quantized.get(self.files[name])
                            read[name] = weight.read(self.dtype) if weight else file.get_tensor(self.files[name][1])
        for name, tensor in read.items():
            self._check(name, tensor)
        return read

    def check_types(self) -> None:
        """Raise UserError for weights in 8 bits or fewer that cannot be dequantized, without reading them."""
        with explained_errors(self.name):
            for path in sorted({path for path, _ in self.files.values()}):
                for tensor in stored_tensors(path):
                    if is_packed(tensor) and (path, tensor.name) not in self.quantized:
                        raise unsupported(self.name, tensor.kind, tensor.name)

    def _check(self, name: str, tensor: Tensor) -> None:
        if name in ID_TENSORS:
            return
        stored = self.stored_name(name)
        if tensor.dtype not in FLOATS:
            raise unsupported(self.name, str(tensor.dtype).removeprefix("torch."), stored)
        if not torch.isfinite(tensor).all():
            raise UserError(f"'{self.name}' has weights that are not finite ({stored}): fetch or copy it again.")

    def stored_name(self, name: str) -> str:
        """The name of a tensor in its file, or the same name if it has none."""
        return self.files[name][1] if name in self.files else name

    def has(self, *names: str) -> bool:
        """Whether it has all of these tensors."""
        return all(name in self.shapes for name in names)

    @property
    def layer_keys(self) -> dict[str, Any]:
        """The part of the config that describes the layers, which speculators nests."""
        keys: dict[str, Any] = self.config.get("transformer_layer_config") or self.config
        return keys

    def renamed(self, prefixes: Mapping[str, str]) -> DrafterCheckpoint:
        """The same checkpoint with other names: prefixes maps beginnings of names to what takes their place."""

        def new(name: str) -> str:
            old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            return prefixes[old] + name.removeprefix(old) if old else name

        shapes = {new(name): shape for name, shape in self.shapes.items()}
        return replace(self, shapes=shapes, files={new(name): place for name, place in self.files.items()})

    def layer_count(self) -> int:
        """The number of layers, by the names of their tensors."""
        numbers = {name.split(".")[1] for name in self.shapes if name.startswith("layers.")}
        return len([number for number in numbers if number.isdigit()])


def read_checkpoint(source: Source) -> DrafterCheckpoint | None:
    """Read the config and the names of the tensors of a folder or a hub id. None if it has no safetensors weights.

    Raises UserError for files that cannot be read.
    """
    if source.gguf:
        return None
    with explained_errors(source.name), quiet():
        folder = downloaded_folder(source)
        files = [*weight_files(folder)]
        if not files or not (folder / CONFIG).is_file():
            return None
        if missing := next((path.name for path in files if not path.exists()), None):
            raise UserError(f"'{source.name}' lacks the file {missing!r}, which its index names: fetch it again.")
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise UserError(f"'{source.name}' has a damaged {CONFIG}: fetch or copy it again.")
        stored = _tensor_names(files)
        weights = quantized_weights(stored, config.get("quantization_config"))
    named = without_parts(stored, weights) | {name: weight.numbers for name, weight in weights.items()}
    places = {name: (tensor.path, tensor.name) for name, tensor in named.items()}
    quantized = {places[name]: weight for name, weight in weights.items()}
    shapes = {name: weights.get(name, tensor).shape for name, tensor in named.items()}
    return DrafterCheckpoint(source.name, config, shapes, places, quantized=quantized)


def _tensor_names(paths: list[Path]) -> dict[str, StoredTensor]:
    named: dict[str, StoredTensor] = {}
    for path in paths:
        for tensor in stored_tensors(path):
            name = tensor.name.removeprefix(PREFIX)
            if name in named:
                raise SafetensorError(f"{name} is stored twice")
            named[name] = tensor
    return named
