"""Weights quantized as publishers store them, and what they mean by the published formulas, number by number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FP8_TOP = 448.0  # the largest float8_e4m3fn
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def scheme(format: str, **weights: Any) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    return COMPRESSED | {"format": format, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def fp8(weight: Tensor, scale: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The stored numbers, and the weight they stand for: blocks of rows x columns share an entry of scale."""
    stored, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(0, weight.shape[0], rows):
        for j in range(0, weight.shape[1], columns):
            factor = scale[i // rows, j // columns]
            part = (weight[i : i + rows, j : j + columns] / factor).clamp(-FP8_TOP, FP8_TOP)
            stored[i : i + rows, j : j + columns] = part.to(torch.float8_e4m3fn)
            meant[i : i + rows, j : j + columns] = part.to(torch.float8_e4m3fn).to(torch.float32) * factor
    return stored, meant


def fp8_parts(name: str, weight: Tensor, block: tuple[int, int] | str, end: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a checkpoint, and the weight. block: its sizes, "tensor" or "row"."""
    rows, columns = weight.shape
    sizes = {"tensor": (rows, columns), "row": (1, columns)}.get(str(block), block)
    shape = (-(-rows // sizes[0]), -(-columns // sizes[1]))
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(rows)) * 0.01 + 0.002
    stored, meant = fp8(weight, scale, *sizes)
    module = name.removesuffix(".weight")
    scale = scale.reshape(()) if block == "tensor" else scale
    return {name: stored, f"{module}.{end}": scale, f"{module}.input_scale": torch.ones(1)}, meant


def packed(values: list[list[int]]) -> Tensor:
    """Rows of integers from -8 to 7 as int32 words, the first integer in the lowest four bits."""
    words = []
    for row in values:
        row = row + [-8] * (-len(row) % 8)
        whole = [sum((row[at + i] + 8) << 4 * i for i in range(8)) for at in range(0, len(row), 8)]
        words.append([word - 2**32 if word >= 2**31 else word for word in whole])
    return torch.tensor(words, dtype=torch.int32)


def int4_parts(
    name: str, weight: Tensor, group: int, *, asymmetric: bool = False, order: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a checkpoint, and the weight. group: columns with one scale. order: whether groups are mixed."""
    rows, columns = weight.shape
    random, groups = torch.Generator().manual_seed(columns), columns // group
    values = torch.randint(-8, 8, (rows, columns), generator=random)
    scale = (torch.rand(rows, groups, generator=random) * 0.1 + 0.01).to(torch.bfloat16)
    zeros = torch.randint(-8, 8, (rows, groups), generator=random) * asymmetric
    of_group = torch.arange(columns) // group
    of_group = of_group[torch.randperm(columns, generator=random)] if order else of_group
    meant = torch.zeros(rows, columns)
    for column, at in enumerate(of_group.tolist()):
        meant[:, column] = scale[:, at].to(torch.float32) * (values[:, column] - zeros[:, at])
    module = name.removesuffix(".weight")
    parts = {"packed": packed(values.tolist()), "scale": scale, "shape": torch.tensor([rows, columns])}
    parts |= {"zero_point": packed(zeros.T.tolist()).T.contiguous()} if asymmetric else {}
    parts |= {"g_idx": of_group.int()} if order else {}
    return {f"{module}.weight_{end}": part for end, part in parts.items()}, meant


def quantized(tensors: dict[str, Tensor], quantize: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint whose matrices are quantized, and the checkpoint of floats that it stands for."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        is_matrix = name.endswith(".weight") and tensor.dim() == 2 and not name.endswith("embed_tokens.weight")
        parts, meant[name] = quantize(name, tensor) if is_matrix else ({name: tensor}, tensor)
        stored |= parts
    return stored, meant
