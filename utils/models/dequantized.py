"""Weights stored in FP8 or as the 4-bit integers of compressed-tensors (W4A16), dequantized when they are read.

FP8 (float8_e4m3fn) has a scale for each tensor, row or block, under the names of vLLM and compressed-tensors or of
DeepSeek (arXiv 2412.19437). W4A16 has eight integers in an int32, and a scale for each row or group of columns. One
weight is read at a time, in the number format that it will have, so nothing is twice in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from utils.errors import UserError
from utils.models.file_model import stored_generation_config
from utils.models.memory import Placement, check_free
from utils.models.quantization import stored_quantization
from utils.models.sources import Source, StoredTensor, downloaded_folder, stored_tensors, weight_files

WEIGHT, PACKED, SHAPE = "weight", "weight_packed", "weight_shape"
SCALE, ZEROS, ORDER = "weight_scale", "weight_zero_point", "weight_g_idx"
SCALES = (SCALE, "weight_scale_inv")  # the second is DeepSeek's name, and means a factor too
# Scales of activations and caches, which keep their number format here.
UNUSED = tuple(f"{name}_{kind}" for name in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point"))
FP8, INT32, FLOATS = "F8_E4M3", "I32", ("F32", "BF16", "F16", "F64")  # in safetensors
COMPRESSED_TENSORS = "compressed-tensors"
QUANTIZED = {"I8": "int8", "U8": "uint8", INT32: "int32", FP8: "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
USUAL_BLOCK = (128, 128)
BITS, OFFSET = 4, 8  # of W4A16: its integers are stored without a sign
ROWS = 256  # that are dequantized at a time
SUPPORTED = (
    "float16, bfloat16 or float32, in FP8 (float8_e4m3fn) with a scale for each tensor, row or block, or in 4 bits of "
    "compressed-tensors (W4A16)"
)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight (R, C). `parts` are its stored tensors by the ends of their names, and `block` the numbers of rows and
    of columns that share a scale.
    """

    parts: Mapping[str, StoredTensor]
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def numbers(self) -> StoredTensor:
        """Its numbers, without their scales."""
        return self.parts[WEIGHT] if WEIGHT in self.parts else self.parts[PACKED]

    def read(self, dtype: torch.dtype) -> Tensor:
        """Dequantize: scale x number, or scale x (number - zero point)."""
        rows, columns = self.shape
        stored = {name: part.read() for name, part in self.parts.items()}
        scale = stored[SCALE].float().reshape(*stored[SCALE].shape, *[1] * (2 - stored[SCALE].dim()))
        zeros = _zero_points(stored[ZEROS], rows) if ZEROS in stored else None
        column = torch.arange(columns) // self.block[1]
        if ORDER in stored and int(stored[ORDER].min()) >= 0:  # the group of each column
            column = stored[ORDER].long()
        weight = torch.empty(self.shape, dtype=dtype)
        for row in torch.arange(rows).split(ROWS):
            part, group = slice(int(row[0]), int(row[-1]) + 1), row // self.block[0]
            numbers = stored[WEIGHT][part].float() if WEIGHT in stored else _unpacked(stored[PACKED][part])[:, :columns]
            if zeros is not None:
                numbers = numbers - zeros[group][:, column]
            weight[part] = numbers * scale[group][:, column]
        return weight


def _unpacked(packed: Tensor) -> Tensor:
    """The integers (R, 8 W) of int32 words (R, W), which begin with the lowest bits."""
    words = packed[..., None] >> torch.arange(0, 32, BITS, dtype=torch.int32)
    integers: Tensor = words & (2**BITS - 1)
    return integers.flatten(1).float() - OFFSET


def _zero_points(stored: Tensor, rows: int) -> Tensor:
    """The zero points (R, G): packed along the rows, or in old files one in each byte."""
    return _unpacked(stored.T)[:, :rows].T if stored.dtype == torch.int32 else stored.float()


def quantized_weights(stored: Mapping[str, StoredTensor], config: Any) -> dict[str, QuantizedWeight]:
    """The weights in supported formats by name, for the tensors and the `quantization_config` of a checkpoint."""
    found: dict[str, QuantizedWeight] = {}
    block = _block(config)
    for name in stored:
        module, _, end = name.rpartition(".")
        if end not in (WEIGHT, PACKED):
            continue
        scale = next((stored[key] for end in SCALES if (key := f"{module}.{end}") in stored), None)
        others = {end: stored[key] for end in (ZEROS, ORDER, SHAPE) if (key := f"{module}.{end}") in stored}
        if scale is not None and scale.kind in FLOATS:
            weight = _recognised({end: stored[name], SCALE: scale} | others, block)
            found |= {} if weight is None else {f"{module}.{WEIGHT}": weight}
    return found


def _recognised(parts: dict[str, StoredTensor], block: Sequence[int]) -> QuantizedWeight | None:
    """The weight with these parts, or None if they do not fit together."""
    if PACKED in parts:
        packed, shape = parts[PACKED], tuple(parts.pop(SHAPE).read().tolist()) if SHAPE in parts else ()
        if packed.kind != INT32 or len(shape) != 2 or packed.shape != (shape[0], -(-shape[1] * BITS // 32)):
            return None
        groups = (parts[SCALE].shape or (1,))[-1]
        sizes = (1, shape[1] // groups if groups and shape[1] % groups == 0 else 0)
    else:
        shape, sizes = parts[WEIGHT].shape, (block[0], block[1])
        if parts[WEIGHT].kind != FP8 or len(shape) != 2 or ZEROS in parts:
            return None
    zeros = parts.get(ZEROS)
    if zeros is not None and zeros.shape != ((shape[0] + 7) // 8 if zeros.kind == INT32 else shape[0], groups):
        return None
    (rows, columns), scales = shape, (*parts[SCALE].shape, 1, 1)[:2]
    for size in ((1, columns), (rows, columns), sizes):
        if min(size) > 0 and scales == (-(-rows // size[0]), -(-columns // size[1])) and len(parts[SCALE].shape) < 3:
            return QuantizedWeight(parts, (rows, columns), size)
    return None


def _block(config: Any) -> Sequence[int]:
    """The rows and columns that a config declares for the blocks of FP8 weights."""
    keys = config if isinstance(config, dict) else {}
    groups = keys.get("config_groups") or {}
    schemes = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    sizes = [keys.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
    sizes += [[1, scheme["group_size"]] for scheme in schemes if scheme.get("group_size")]
    return next((size for size in sizes if isinstance(size, list) and len(size) == 2), USUAL_BLOCK)


def without_parts(
    stored: Mapping[str, StoredTensor], weights: Mapping[str, QuantizedWeight]
) -> dict[str, StoredTensor]:
    """The tensors that are not parts of these weights, nor scales of the activations of a quantized checkpoint."""
    modules = {name.rpartition(".")[0] for name in weights}
    ends = (WEIGHT, PACKED, SHAPE, *SCALES, ZEROS, ORDER)
    parts = {f"{module}.{end}" for module in modules for end in ends}
    return {
        name: tensor
        for name, tensor in stored.items()
        if name not in parts and not (modules and name.rpartition(".")[2] in UNUSED)
    }


def dequantized_model(
    source: Source, config: PreTrainedConfig, where: Placement
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """A model that compressed-tensors stored, or on a CPU one in FP8, and transformers' loading info. None for others.

    Then the config no longer says that it is quantized. Raises UserError for a format that is not supported, unless the
    package is there, with which transformers reads further ones.
    """
    method = stored_quantization(config)
    if method != COMPRESSED_TENSORS and (method, where.device) != ("fp8", "cpu"):
        return None
    folder = downloaded_folder(source)
    files = filter(Path.is_file, weight_files(folder))
    stored = {tensor.name: tensor for path in files for tensor in stored_tensors(path)}
    weights = quantized_weights(stored, config.quantization_config)
    rest = without_parts(stored, weights)
    if odd := next((tensor for tensor in rest.values() if is_packed(tensor)), None):
        if method != COMPRESSED_TENSORS or find_spec("compressed_tensors") is not None:
            return None
        raise unsupported(source.name, odd.kind, odd.name)
    dtype = where.dtype if isinstance(where.dtype, torch.dtype) else config.dtype or torch.bfloat16
    shapes = [weight.shape for weight in weights.values()] + [tensor.shape for tensor in rest.values()]
    check_free(source.name, sum(map(prod, shapes)) * dtype.itemsize, "cpu", "use --dtype bfloat16, or a smaller model")
    del config.quantization_config
    state = {name: tensor.read() for name, tensor in rest.items()}
    state |= {name: weight.read(dtype) for name, weight in weights.items()}
    with torch.device("meta"):
        made = type(AutoModelForCausalLM.from_config(config))
    keywords = {"dtype": dtype, "device_map": {"": where.device}, "output_loading_info": True}
    model, loading_info = made.from_pretrained(None, config=config, state_dict=state, **keywords)
    model.generation_config = stored_generation_config(model, folder)
    return model, loading_info


def is_packed(tensor: StoredTensor) -> bool:
    """Whether it is a weight in 8 bits or fewer. Other tensors of bytes are masks and tables."""
    end = tensor.name.rpartition(".")[2]
    return end in (PACKED, "qweight") or (end == WEIGHT and tensor.kind in QUANTIZED)


def unsupported(name: str, kind: str, stored: str) -> UserError:
    """An error for a checkpoint with a tensor in a number format that cannot be read."""
    return UserError(
        f"'{name}' has weights in {QUANTIZED.get(kind, kind)} ({stored}), and this quantized format is not supported: "
        f"name one with weights in {SUPPORTED}."
    )
