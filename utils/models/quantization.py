"""The one adapter to the two quantization libraries.

`int8` (optimum-quanto) rewrites a model that is already loaded; `nf4` (bitsandbytes) happens while the weights are read. Neither can be
asked of transformers together with a GGUF file. Importing them is slow, so each is imported when it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from utils.bounds import QUANTIZATIONS
from utils.errors import UserError


def check_kind(kind: str, *, gguf: bool, name: str) -> None:
    """Raise UserError for an unknown kind, or one that the file format excludes."""
    if kind not in QUANTIZATIONS:
        raise UserError(f"'{kind}' is no quantization: it must be one of {', '.join(QUANTIZATIONS)}.")
    if kind == "nf4" and gguf:
        raise UserError(f"nf4 cannot be made from the GGUF file {name}: use int8, or the model's safetensors folder.")


def loading_arguments(kind: str, dtype: torch.dtype | str) -> dict[str, Any]:
    """What `from_pretrained` has to be told, beyond where the model is."""
    if kind != "nf4":
        return {}
    # The weights are stored in 4 bits; what is multiplied has to have a format of its own.
    compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)}


def quantize_loaded(model: PreTrainedModel, kind: str) -> None:
    """Quantize in place what `loading_arguments` could not. The head keeps its precision: it decides the tokens."""
    if kind == "int8":
        from optimum.quanto import freeze, qint8, quantize

        # Its name differs between architectures.
        head = model.get_output_embeddings()
        quantize(model, weights=qint8, exclude=[name for name, module in model.named_modules() if module is head])
        freeze(model)
