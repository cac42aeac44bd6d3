"""A drafter's checkpoint on disk: its config, and its tensors by name, which are read only when they are needed.

Layouts differ in prefixes, so names are normalised here. Only safetensors files are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from utils.errors import UserError
from utils.models.load_errors import explained_errors, quiet
from utils.models.quantization import QuantizedWeight, is_packed, unsupported, with_quantized
from utils.models.sources import Source, StoredTensor, downloaded_folder, stored_tensors, weight_files

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREFIX = "model."  # some exports put it before every name
# Beginnings of names in other layouts, and those of speculators.
RENAMED = {"midlayer.": "layers.0.", "logit_head.": ""} | {
    f"aux_norm_{place}.": f"fc_norm.{index}." for index, place in enumerate(("low", "mid", "high"))
}
DRAFT_TO_TARGET, ORDERING = "d2t", "masked_embedding.token_ordering"
ID_TENSORS = (DRAFT_TO_TARGET, "t2d", ORDERING)  # the others are weights
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class JoinedExperts(NamedTuple):
    """The matrices of all experts, which are read as one tensor (experts, rows, columns)."""

    experts: list[list[Stored]]
    shape: tuple[int, ...]


Stored = StoredTensor | QuantizedWeight | JoinedExperts


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A drafter's files.

    `name` is for messages, `config` is config.json, and `stored` are the tensors by name. Those that are quantized are
    dequantized when they are read, to the number format `dtype`.
    """

    name: str
    config: dict[str, Any]
    stored: Mapping[str, Stored]
    dtype: torch.dtype = torch.float32

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: part.shape for name, part in self.stored.items()}

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read these tensors, or all. Raises UserError for one that is missing, damaged or not finite."""
        wanted = list(self.stored if names is None else names)
        if missing := next((name for name in wanted if name not in self.stored), None):
            raise UserError(f"'{self.name}' has no tensor {missing}: fetch or copy its files again.")
        with explained_errors(self.name):
            return {name: self._read(name, self.stored[name]) for name in wanted}

    def _read(self, name: str, part: Stored) -> Tensor:
        if isinstance(part, JoinedExperts):
            experts = ([self._read(name, one) for one in expert] for expert in part.experts)
            return torch.stack([torch.cat(expert) for expert in experts])
        tensor = part.read() if isinstance(part, StoredTensor) else part.read(self.dtype)
        if name not in ID_TENSORS and tensor.dtype not in FLOATS:
            raise unsupported(self.name, str(tensor.dtype).removeprefix("torch."), part.name)
        if name not in ID_TENSORS and not torch.isfinite(tensor).all():
            raise UserError(f"'{self.name}' has weights that are not finite ({part.name}): fetch or copy it again.")
        return tensor

    def check_types(self) -> None:
        """Raise UserError for weights in 8 bits or fewer that cannot be dequantized, without reading them."""
        for part in self.stored.values():
            if isinstance(part, StoredTensor) and is_packed(part):
                raise unsupported(self.name, part.kind, part.name)

    def has(self, *names: str) -> bool:
        """Whether it has all of these tensors."""
        return all(name in self.stored for name in names)

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

        return replace(self, stored={new(name): part for name, part in self.stored.items()})

    def layer_count(self) -> int:
        """The number of layers, by the names of their tensors."""
        numbers = {name.split(".")[1] for name in self.stored if name.startswith("layers.")}
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
        stored: dict[str, StoredTensor] = {}
        for tensor in chain.from_iterable(map(stored_tensors, files)):
            if (name := tensor.name.removeprefix(PREFIX)) in stored:
                raise SafetensorError(f"{name} is stored twice")
            stored[name] = tensor
        weights = with_quantized(stored, config.get("quantization_config"))
        return DrafterCheckpoint(source.name, config, weights).renamed(RENAMED)
