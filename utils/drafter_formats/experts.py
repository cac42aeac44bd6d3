"""Experts of sparse layers: checkpoints store each one on its own, and transformers' classes hold them joined."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.errors import UserError

ONE = re.compile(r"(.*\.experts)\.(\d+)\.(?:gate|up|down)_proj\.weight")
JOINED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


@dataclass(frozen=True, slots=True)
class JoinedExperts(DrafterCheckpoint):
    """A checkpoint whose experts are joined when they are read.

    separate: the checkpoint as it is stored. joined: by the name of a tensor (experts, rows, columns), the names of the
    parts of each expert.
    """

    separate: DrafterCheckpoint
    joined: dict[str, list[list[str]]]

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read these tensors, or all. Raises UserError for one that is missing, damaged or not finite."""
        wanted = list(self.shapes if names is None else names)
        read = self.separate.tensors([name for name in wanted if name not in self.joined])
        for name in wanted:
            if name in self.joined:
                parts = self.separate.tensors([part for expert in self.joined[name] for part in expert])
                read[name] = torch.stack([torch.cat([parts[part] for part in expert]) for expert in self.joined[name]])
        return read


def with_joined_experts(checkpoint: DrafterCheckpoint) -> DrafterCheckpoint:
    """The same checkpoint with the experts of each layer as one tensor. Raises UserError if one is missing or has a
    shape of its own.
    """
    counts: dict[str, int] = {}
    for match in filter(None, map(ONE.fullmatch, checkpoint.shapes)):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if not ONE.fullmatch(name)}
    joined = {}
    for prefix, count in counts.items():
        for name, kinds in JOINED.items():
            experts = [[f"{prefix}.{index}.{kind}_proj.weight" for kind in kinds] for index in range(count)]
            rows, columns = _part_shape(checkpoint, [part for expert in experts for part in expert])
            joined[f"{prefix}.{name}"], shapes[f"{prefix}.{name}"] = experts, (count, len(kinds) * rows, columns)
    name, config, files = checkpoint.name, checkpoint.config, checkpoint.files
    return JoinedExperts(name, config, shapes, files, checkpoint, joined) if joined else checkpoint


def _part_shape(checkpoint: DrafterCheckpoint, parts: list[str]) -> tuple[int, ...]:
    """The shape that all of these tensors have."""
    shape = checkpoint.shapes.get(parts[0], ())
    if len(shape) != 2 or (odd := next((part for part in parts if checkpoint.shapes.get(part) != shape), None)):
        part = parts[0] if len(shape) != 2 else odd
        raise UserError(f"'{checkpoint.name}' has no usable tensor {part}: fetch or copy its files again.")
    return shape
