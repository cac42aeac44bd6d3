"""What the weights of a pair are: their format, their size in memory, and what follows from it for texts and time.

Sizes are counted whatever the weights are stored as: plain tensors, quanto's or those of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from utils.distributed import number_of, together
from utils.models.quantization import has_nf4_kernel
from utils.units import in_units

SCALES = ("absmax", "code", "SCB")


def stored_bytes(model: nn.Module, *, besides: nn.Module | None = None) -> int:
    """Bytes of all parameters and buffers, scales included, those that share memory counted once; not those of `besides`."""
    others = set() if besides is None else set(_sizes(besides))
    return sum(size for place, size in _sizes(model).items() if place not in others)


def target_weights(pair: Any) -> str:
    """Format and size, for the screen."""
    return _line(pair.dtype, pair.quantize, in_units(pair.memory))


def drafter_weights(pair: Any) -> str:
    """Format and size of what the drafter does not share with the target."""
    if pair.drafter is None:
        return "none"
    size = in_units(pair.drafter_memory) if pair.drafter_memory else "all the target's own"
    return _line(pair.drafter_dtype, pair.drafter_quantize or "none", size)


def loaded_line(pair: Any) -> str:
    """What was loaded, for the screen."""
    drafter = "" if pair.drafter is None else f"; {pair.drafter_name} ({drafter_weights(pair)})"
    return f"loaded {pair.target_name} ({target_weights(pair)}){drafter}"


def weight_notes(pair: Any) -> tuple[str, ...]:
    """What the user should know: where the same text cannot be promised, and where a quantization costs time."""
    slow = [(pair.quantize, pair.dtype, pair.device, pair.target_name)]
    if pair.drafter_kind == "model":
        slow.append((pair.drafter_quantize, pair.drafter_dtype, pair.drafter_device, pair.drafter_name))
    why = _moves(pair.quantize, pair.dtype, pair.target_name)
    texts = (
        [f"{why}: texts can part where two tokens are near, unless the engine is verified (/audit measures it)"]
        if why
        else []
    )
    spread = (f"{number_of()} processes compute {pair.target_name} together: what is said of its memory is of each",)
    return (
        *(spread if together() else ()),
        *texts,
        *(
            f"{kind} saves memory, not time: on this CPU it makes {name} slower than float32"
            for kind, dtype, device, name in slow
            if _is_slow(kind, dtype, device)
        ),
    )


def _line(dtype: str, kind: str, size: str) -> str:
    return ", ".join((dtype, size) if kind == "none" else (dtype, kind, size))


def _moves(kind: str, dtype: str, name: str) -> str:
    """Why a model's logits depend on how many tokens it is fed at a time, beyond float32's rounding; or nothing."""
    if kind == "bnb-int8":
        return f"bnb-int8 looks for outliers in all rows of a window together, so {name}'s logits depend on its width"
    if dtype != "float32":
        return f"{dtype} rounds {name}'s logits by the width of a window"
    return ""


def _is_slow(kind: str, dtype: str, device: str) -> bool:
    """Whether the weights are unpacked at every step, by a CPU that would have multiplied full ones in less time."""
    if device != "cpu" or kind == "none":
        return False
    return dtype != "bfloat16" or not (kind == "int8" or (kind == "nf4" and has_nf4_kernel()))


def _sizes(model: nn.Module) -> dict[tuple[str, int], int]:
    """Bytes by the place where they begin."""
    tensors = [plain for module in model.modules() for tensor in _held(module) for plain in _plain(tensor)]
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        place = (
            str(tensor.device),
            tensor.data_ptr() or id(tensor),
        )  # none where accelerate keeps it elsewhere until it is used
        sizes[place] = max(tensor.nbytes, sizes.get(place, 0))
    return sizes


def _held(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
    # bitsandbytes keeps the scales in objects of its own.
    for state in (getattr(module._parameters.get("weight"), "quant_state", None), getattr(module, "state", None)):
        scales = (getattr(state, name, None) for name in SCALES)
        yield from (scale for scale in scales if isinstance(scale, Tensor))


def _plain(tensor: Any) -> Iterator[Tensor]:
    """A tensor, or those that one consists of: bytes and scales, or this process's part of one that several hold."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from _plain(part)
