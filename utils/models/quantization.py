"""The one adapter to the two quantization libraries, for weights alone: what is multiplied keeps the model's number format.

optimum-quanto (`int8`, `int4`) rewrites a model that is loaded; bitsandbytes (`bnb-int8`, `nf4`) quantizes while the weights are read, or
afterwards where transformers reads them in another way (GGUF). Importing them is slow, so each is imported when it is used.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from utils.bounds import QUANTIZATIONS
from utils.errors import UserError
from utils.freed_memory import give_back_memory
from utils.models.load_errors import is_out_of_memory

QUANTO, BITSANDBYTES = ("int8", "int4"), ("bnb-int8", "nf4")
OUTLIER = 6.0  # LLM.int8's threshold, and transformers' default
LEAST_GROUP = 32  # weights that share a scale in int4


def check_kind(kind: str, device: str) -> None:
    """Raise UserError for an unknown kind, or one that the device excludes."""
    if kind not in QUANTIZATIONS:
        raise UserError(f"'{kind}' is no quantization: it must be one of {', '.join(QUANTIZATIONS)}.")
    if kind in BITSANDBYTES and device == "mps":
        raise UserError(f"{kind} (bitsandbytes) does not run on mps: use int8, or --device cpu.")


def stored_kind(config: Any) -> str | None:
    """How a checkpoint's own weights are quantized; None where they are not."""
    told = getattr(config, "quantization_config", None)
    if told is None:
        return None
    told = told if isinstance(told, dict) else told.to_dict()
    method = str(getattr(told.get("quant_method"), "value", told.get("quant_method")))
    if method != "bitsandbytes":
        return method
    return "bnb-int8" if told.get("load_in_8bit") else "nf4"


def check_stored(config: Any, kind: str, name: str) -> None:
    """Raise UserError for a quantization of what is quantized already."""
    found = stored_kind(config)
    if found in BITSANDBYTES:
        _hush()
    if found is not None and kind != "none":
        raise UserError(f"'{name}' is quantized already ({found}): leave {kind} out.")


def _hush() -> None:
    """Else every product of a float32 model logs that it is cast."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def loading_arguments(kind: str, dtype: torch.dtype | str) -> dict[str, Any]:
    """What `from_pretrained` has to be told, beyond where the model is."""
    if kind not in BITSANDBYTES:
        return {}
    if kind == "bnb-int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIER)}
    # The weights are stored in 4 bits; what is multiplied has to have a format of its own.
    compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
    }


def quantize_loaded(model: PreTrainedModel, kind: str, name: str) -> None:
    """Quantize in place what `loading_arguments` could not, and see that it runs. The head keeps its precision: it decides the tokens.

    Raises UserError where the model, called `name`, cannot be had in this kind.
    """
    if kind == "none":
        return
    if kind in BITSANDBYTES:
        _hush()
    if not getattr(model, "is_quantized", False):
        layers = _layers(model)
        if not layers:
            raise UserError(f"'{name}' has no linear layers that {kind} could be made of: leave the quantization out.")
        if kind in QUANTO:
            _quantize_by_quanto(model, kind, layers, name)
        else:
            for layer in layers:
                model.set_submodule(layer, _bitsandbytes_linear(model.get_submodule(layer), kind))
        model.eval().is_quantized = True
    elif kind in QUANTO:
        raise UserError(f"'{name}' is quantized already: leave {kind} out.")
    if kind == "nf4":
        _choose_kernels(model)
    _let_go_of_files(model)
    give_back_memory()
    _check_runs(model, kind, name)


def has_nf4_kernel() -> bool:
    """Whether bitsandbytes multiplies by nf4 weights as they are on this CPU: in bfloat16, whatever the model's format."""
    from bitsandbytes.nn.modules import has_avx512bf16

    return bool(has_avx512bf16())


def _layers(model: PreTrainedModel) -> list[str]:
    """The names of the linear layers to quantize."""
    head = model.get_output_embeddings()
    kept = set(
        getattr(model, "_keep_in_fp32_modules", None) or ()
    )  # T5's inputs follow the format of one layer's weight
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    return [name for name in linears if not kept & set(name.split("."))]


def _quantize_by_quanto(model: PreTrainedModel, kind: str, layers: list[str], name: str) -> None:
    from optimum.quanto import freeze, qint4, qint8, quantize

    if kind == "int4":
        _check_widths(model, layers, name)
        _replace_extensions()
    quantize(model, weights={"int8": qint8, "int4": qint4}[kind], include=layers)
    freeze(model)


def _check_widths(model: PreTrainedModel, layers: list[str], name: str) -> None:
    """quanto would have a whole row share one scale, which 4 bits do not bear."""
    for layer in layers:
        width = model.get_submodule(layer).in_features
        if width > 128 and width % LEAST_GROUP:
            raise UserError(
                f"'{name}' cannot be had in int4: its layer {layer} has {width} columns, not a multiple of {LEAST_GROUP}; use int8 or nf4."
            )


def _replace_extensions() -> None:
    """quanto would compile C++ or CUDA for a minute, where there is a compiler, to take bytes apart: three torch operations do the same."""
    from optimum.quanto.library.extensions import extension

    for known in extension._extensions.values():
        known._lib = SimpleNamespace(unpack=_unpack)
    extension._extensions.pop(
        "quanto_cuda", None
    )  # its other kernels are looked for here; without them, torch's are used


def _unpack(packed: Tensor, bits: int) -> Tensor:
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


def _bitsandbytes_linear(layer: Any, kind: str) -> nn.Module:
    """What transformers makes of a layer while it reads a checkpoint."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    shape = (layer.in_features, layer.out_features, layer.bias is not None)
    weight, device = layer.weight.data, layer.weight.device
    if kind == "nf4":
        made: nn.Module = Linear4bit(
            *shape, compute_dtype=weight.dtype, compress_statistics=False, quant_type="nf4", device="meta"
        )
        made.weight = Params4bit(weight, compress_statistics=False, quant_type="nf4", module=made).to(device)
    else:
        made = Linear8bitLt(*shape, has_fp16_weights=False, threshold=OUTLIER, device="meta")
        made.weight = Int8Params(weight.cpu(), requires_grad=False).to(device)
    made.bias = layer.bias
    return made


def _choose_kernels(model: PreTrainedModel) -> None:
    """bitsandbytes has one for CPUs that rounds all to bfloat16, and takes whole blocks only: it is left to models of that format."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            fits = model.dtype == torch.bfloat16 and layer.in_features % 64 == 0 and layer.out_features % 32 == 0
            layer.support_avx512bf16_for_cpu = layer.support_avx512bf16_for_cpu and fits


def _let_go_of_files(model: PreTrainedModel) -> None:
    """Copy what was not quantized: one norm would keep the file of all the full weights mapped, and resident."""
    for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def _check_runs(model: PreTrainedModel, kind: str, name: str) -> None:
    """A step and a small window: kernels differ, and some fail only when they are called."""
    try:
        for width in (1, 3):
            ids = torch.zeros((1, width), dtype=torch.long, device=model.device)
            decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
            with torch.no_grad():
                model(input_ids=ids, use_cache=False, **decoded)
    except Exception as error:  # whatever a kernel throws
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0][:200].rstrip(".") or type(error).__name__
        raise UserError(
            f"'{name}' does not run in {kind} on {model.device}, {model.dtype} ({reason}): use another --quantize."
        ) from error
