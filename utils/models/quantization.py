"""The adapter to the two quantization libraries. Only weights are quantized; products keep the model's number format.

optimum-quanto (`int8`, `int4`) rewrites a loaded model. bitsandbytes (`bnb-int8`, `nf4`) quantizes while the weights
are read from safetensors. Both are slow to import, so each is imported when it is used.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from utils.errors import UserError
from utils.freed_memory import release_memory
from utils.models.file_model import layer_linears
from utils.models.sources import Source

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
