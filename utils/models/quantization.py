"""The adapter to the two quantization libraries, and quantized formats of checkpoints that are dequantized when read.

Only weights are quantized; products keep the model's number format. optimum-quanto (`int8`, `int4`) rewrites a loaded
model. bitsandbytes (`bnb-int8`, `nf4`) quantizes while the weights are read from safetensors. Both are slow to import,
so each is imported when it is used. Stored weights are read one at a time, in the number format that they will have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from utils.errors import UserError
from utils.freed_memory import release_memory
from utils.models.file_model import layer_linears, stored_generation_config
from utils.models.memory import Placement, check_free
from utils.models.sources import Source, StoredTensor, downloaded_folder, stored_tensors, weight_files

BITSANDBYTES = ("bnb-int8", "nf4")
OUTLIER_THRESHOLD = 6.0  # of LLM.int8 (Dettmers et al. 2022, arXiv 2208.07339), and transformers' default
GROUP_SIZE = 32  # smallest group of weights that share a scale in int4
# It would log a cast at every product of a float32 model.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def check_quantization(kind: str, device: str) -> None:
    """Raise UserError for a kind of quantization that does not run on the device."""
    if kind in BITSANDBYTES and device == "mps":
        raise UserError(f"{kind} (bitsandbytes) does not run on mps: use int8, or --device cpu.")


def stored_quantization(config: PreTrainedConfig) -> str | None:
    """Return how a checkpoint's own weights are quantized, or None if they are not."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    fields = stored if isinstance(stored, dict) else stored.to_dict()
    # An enum in some configs, a plain string in others.
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    if method != "bitsandbytes":
        return method
    return "bnb-int8" if fields.get("load_in_8bit") else "nf4"


def check_not_quantized(config: PreTrainedConfig, kind: str, source: Source) -> None:
    """Raise UserError if a quantized checkpoint is to be quantized again, or a GGUF file by bitsandbytes."""
    stored = stored_quantization(config)
    if stored is not None and kind != "none":
        raise UserError(f"'{source.name}' is already quantized ({stored}): omit {kind}.")
    if source.gguf and kind in BITSANDBYTES:
        raise UserError(f"{kind} (bitsandbytes) does not read GGUF files such as '{source.name}': use int8 or int4.")


def quantization_arguments(kind: str, dtype: torch.dtype | str) -> dict[str, Any]:
    """Return the keywords with which `from_pretrained` quantizes, if it can."""
    if kind == "bnb-int8":
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIER_THRESHOLD)
    elif kind == "nf4":
        # Products need a number format of their own, because weights are stored in 4 bits.
        compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    else:
        return {}
    return {"quantization_config": config}


def quantize_loaded(model: PreTrainedModel, kind: str, name: str) -> None:
    """Quantize in place what `quantization_arguments` could not.

    The output head keeps its precision, because it decides the tokens. Raises UserError if the model, called `name` in
    messages, cannot be quantized this way.
    """
    if kind == "none":
        return
    if kind not in BITSANDBYTES:
        # The inputs of some T5 layers take the dtype of the layer's weight, so these layers must not be quantized.
        excluded = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        layers = [name for name in layer_linears(model) if not excluded & set(name.split("."))]
        if not layers:
            raise UserError(f"'{name}' has no linear layers to quantize: omit {kind}.")
        _quantize_with_quanto(model, kind, layers, name)
        # The flag that transformers sets when it quantizes; the engine and the messages read it.
        model.eval().is_quantized = True
    if kind == "nf4":
        _choose_kernels(model)
    # The weights that are left would otherwise keep the unquantized checkpoint file in memory.
    _release_mapped_file(model)
    release_memory()


def _release_mapped_file(model: PreTrainedModel) -> None:
    """Copy the remaining CPU weights into memory of their own. Quantized tensors, which are of other classes, are left
    alone.
    """
    # Shared tensors once: `data` is replaced in place, so they stay shared.
    for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into values of 2 or 4 bits, in quanto's order."""
    # The lowest bits of all bytes come first, along dimension 0.
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


def _quantize_with_quanto(model: PreTrainedModel, kind: str, layers: list[str], name: str) -> None:
    from optimum.quanto import freeze, qint4, qint8, quantize

    if kind == "int4":
        _check_widths(model, layers, name)
        _replace_extensions()
    # By name: quanto's own default would include the output head.
    quantize(model, weights={"int8": qint8, "int4": qint4}[kind], include=layers)
    freeze(model)


def _check_widths(model: PreTrainedModel, layers: list[str], name: str) -> None:
    """Reject layers in which quanto would use one scale for a whole row, which is too coarse for 4 bits."""
    for layer in layers:
        width = model.get_submodule(layer).in_features
        if width > 128 and width % GROUP_SIZE:
            raise UserError(
                f"'{name}' cannot be quantized to int4: layer {layer} has {width} columns, which is not a multiple of "
                f"{GROUP_SIZE}; use int8 or nf4."
            )


def _replace_extensions() -> None:
    """Replace the C++ and CUDA extensions, which quanto would compile for a minute, by a few torch operations."""
    from optimum.quanto.library.extensions import extension

    for known in extension._extensions.values():
        known._lib = SimpleNamespace(unpack=unpack)
    # quanto uses torch's own kernels if its CUDA extension is not listed.
    extension._extensions.pop("quanto_cuda", None)


def _choose_kernels(model: PreTrainedModel) -> None:
    """Use the CPU kernel of bitsandbytes only in bfloat16 models, because it rounds everything to bfloat16.

    It also takes whole blocks only.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            fits = model.dtype == torch.bfloat16 and layer.in_features % 64 == 0 and layer.out_features % 32 == 0
            layer.support_avx512bf16_for_cpu = layer.support_avx512bf16_for_cpu and fits


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

    FP8 (float8_e4m3fn) has a scale for each tensor, row or block, under the names of vLLM and compressed-tensors or of
    DeepSeek (arXiv 2412.19437). W4A16 has eight integers in an int32, and a scale for each row or group of columns.
    """

    parts: Mapping[str, StoredTensor]
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def name(self) -> str:
        """That of its numbers, without their scales."""
        return (self.parts[WEIGHT] if WEIGHT in self.parts else self.parts[PACKED]).name

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


def with_quantized(stored: Mapping[str, StoredTensor], config: Any) -> dict[str, StoredTensor | QuantizedWeight]:
    """The tensors of a checkpoint by name, with weights in supported formats in place of their parts and scales."""
    found: dict[str, QuantizedWeight] = {}
    block = _block(config)
    _check_rotations(config)
    for name in stored:
        module, _, end = name.rpartition(".")
        if end not in (WEIGHT, PACKED):
            continue
        forms, scales = (
            [stored[key] for end in ends if (key := f"{module}.{end}") in stored] for ends in ((WEIGHT, PACKED), SCALES)
        )
        others = {end: stored[key] for end in (ZEROS, ORDER, SHAPE) if (key := f"{module}.{end}") in stored}
        if len(forms) == len(scales) == 1 and scales[0].kind in FLOATS:  # of several, none is known to be right
            weight = _recognised({end: stored[name], SCALE: scales[0]} | others, block)
            found |= {} if weight is None else {f"{module}.{WEIGHT}": weight}
    ends = (WEIGHT, PACKED, SHAPE, *SCALES, ZEROS, ORDER)
    parts = {name.removesuffix(WEIGHT) + end for name in found for end in ends}
    unused = UNUSED if found else ()
    rest = {
        name: tensor for name, tensor in stored.items() if name not in parts and name.rpartition(".")[2] not in unused
    }
    return rest | found


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
    if ORDER in parts and parts[ORDER].shape != (columns,):
        return None
    for size in ((1, columns), (rows, columns), sizes):
        if min(size) > 0 and scales == (-(-rows // size[0]), -(-columns // size[1])) and len(parts[SCALE].shape) < 3:
            return QuantizedWeight(parts, (rows, columns), size)
    return None


def _check_rotations(config: Any) -> None:
    """Raise UserError if inputs or outputs of layers are to be rotated too, as in SpinQuant and QuIP."""
    groups = ((config.get("transform_config") if isinstance(config, dict) else None) or {}).get("config_groups") or {}
    places = {part.get("location") for scheme in groups.values() for part in scheme.get("apply") or []}
    if places - {"weight_input", "weight_output"}:  # these are in the stored weights
        raise UserError(
            "Weights that need rotated inputs or outputs (transform_config in config.json) are not supported: "
            "name a checkpoint without them."
        )


def _block(config: Any) -> Sequence[int]:
    """The rows and columns that a config declares for the blocks of FP8 weights."""
    keys = config if isinstance(config, dict) else {}
    groups = keys.get("config_groups") or {}
    schemes = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    sizes = [keys.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
    sizes += [[1, scheme["group_size"]] for scheme in schemes if scheme.get("group_size")]
    return next((size for size in sizes if isinstance(size, list) and len(size) == 2), USUAL_BLOCK)


def dequantized_model(
    source: Source, config: PreTrainedConfig, kind: str, where: Placement
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """A quantized model that compressed-tensors stored, or on a CPU one in FP8, or one that transformers would read
    without its scales; and transformers' loading info. None for others.

    Then the config no longer says that it is quantized. Raises UserError for a format that is not supported, unless the
    package is there, with which transformers reads further ones, or if it is to be quantized again.
    """
    method = stored_quantization(config)
    is_known = method in (*AUTO_QUANTIZATION_CONFIG_MAPPING, *BITSANDBYTES)
    if source.gguf or (is_known and method != COMPRESSED_TENSORS and (method, where.device) != ("fp8", "cpu")):
        return None
    folder = downloaded_folder(source)
    files = filter(Path.is_file, weight_files(folder))
    stored = {tensor.name: tensor for path in files for tensor in stored_tensors(path)}
    weights = with_quantized(stored, getattr(config, "quantization_config", None))
    if odd := [part for part in weights.values() if isinstance(part, StoredTensor) and is_packed(part)]:
        # On a CPU, transformers reads joined experts without their scales.
        joined = [part for part in odd if not part.name.endswith(f".{WEIGHT}")]
        has_package = method == COMPRESSED_TENSORS and find_spec("compressed_tensors") is not None
        if has_package or (method == "fp8" and not joined):
            return None
        first = (joined or odd)[0]
        raise unsupported(source.name, first.kind, first.name)
    if not is_known and not any(isinstance(part, QuantizedWeight) for part in weights.values()):
        return None
    if kind != "none":
        raise UserError(f"'{source.name}' is already quantized (FP8 or 4 bits): omit {kind}.")
    dtype = where.dtype if isinstance(where.dtype, torch.dtype) else config.dtype or torch.bfloat16
    needed = sum(prod(part.shape) for part in weights.values()) * dtype.itemsize
    check_free(source.name, needed, "cpu", "use --dtype bfloat16, or a smaller model")
    vars(config).pop("quantization_config", None)
    state = {
        name: part.read() if isinstance(part, StoredTensor) else part.read(dtype) for name, part in weights.items()
    }
    with torch.device("meta"):
        made = type(AutoModelForCausalLM.from_config(config))
    keywords = {"dtype": dtype, "device_map": {"": where.device}, "output_loading_info": True}
    model, loading_info = made.from_pretrained(None, config=config, state_dict=state, **keywords)
    model.generation_config = stored_generation_config(model, folder)
    return model, loading_info


def is_packed(tensor: StoredTensor) -> bool:
    """Whether it is a weight in 8 bits or fewer. Other tensors of bytes are masks and tables."""
    end = tensor.name.rpartition(".")[2]
    is_small = tensor.kind.startswith(("F4", "F6_", "F8")) and "scale" not in end  # experts have names of their own
    return is_small or end in (PACKED, "qweight") or (end == WEIGHT and tensor.kind not in FLOATS)


def unsupported(name: str, kind: str, stored: str) -> UserError:
    """An error for a checkpoint with a tensor in a number format that cannot be read."""
    return UserError(
        f"'{name}' has weights in {QUANTIZED.get(kind, kind)} ({stored}), and this quantized format is not supported: "
        f"name one with weights in {SUPPORTED}."
    )
