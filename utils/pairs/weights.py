"""The weights of a pair: number format, size in memory, and consequences for texts and speed that users should know.

Sizes are counted for every storage format: plain tensors and those of quanto and bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from utils.distributed import is_tensor_parallel, world_size
from utils.models.quantization import has_nf4_kernel
from utils.pairs.pair import Pair
from utils.text import byte_size

BNB_INT8 = "bnb-int8"
BITSANDBYTES_SCALES = ("absmax", "code", "SCB")


def stored_bytes(model: nn.Module, *, besides: nn.Module | None = None) -> int:
    """Bytes of all parameters, buffers and scales, except those of `besides`. Shared memory counts once."""
    excluded = set() if besides is None else set(_sizes(besides))
    return sum(size for address, size in _sizes(model).items() if address not in excluded)


def describe_target(pair: Pair) -> str:
    """Number format and size of the target's weights."""
    return _description(pair.dtype, pair.quantize, byte_size(pair.memory))


def describe_drafter(pair: Pair) -> str:
    """Number format and size of the drafter's weights that it does not share with the target."""
    if pair.drafter is None:
        return "none"
    size = byte_size(pair.drafter_memory) if pair.drafter_memory else "shared with the target"
    return _description(str(pair.drafter_dtype), pair.drafter_quantize or "none", size)


def loaded_message(pair: Pair) -> str:
    """The message after a pair was loaded."""
    drafter = "" if pair.drafter is None else f"; {pair.drafter_name} ({describe_drafter(pair)})"
    return f"loaded {pair.target_name} ({describe_target(pair)}){drafter}"


def weight_notes(pair: Pair) -> Iterator[str]:
    """Messages for the user: where equal texts cannot be guaranteed, and where quantization makes a model slower."""
    if is_tensor_parallel():
        yield f"{world_size()} processes compute {pair.target_name} together: its memory is that of each process"
    if reason := _width_dependence(pair.quantize, pair.dtype, pair.target_name):
        yield f"{reason}: texts can differ where two tokens are close, unless the engine is verified (see /audit)"
    weights = [(pair.quantize, pair.dtype, pair.device, pair.target_name)]
    if pair.drafter_kind == "model":
        drafter = (pair.drafter_quantize, pair.drafter_dtype, pair.drafter_device, pair.drafter_name)
        weights.append((str(drafter[0]), str(drafter[1]), str(drafter[2]), str(drafter[3])))
    for quantize, dtype, device, name in weights:
        if _is_slow(quantize, dtype, device):
            yield f"{quantize} saves memory but not time: on this CPU {name} is slower than in float32"


def depends_on_width(pair: Pair) -> bool:
    """Whether the target's logits depend on the verify width by more than rounding.

    bnb-int8 keeps columns with outliers in full precision, and searches all rows of a pass for them.
    """
    return pair.quantize == BNB_INT8


def _description(dtype: str, quantize: str, size: str) -> str:
    return ", ".join((dtype, size) if quantize == "none" else (dtype, quantize, size))


def _width_dependence(quantize: str, dtype: str, name: str) -> str:
    """Why logits depend on the verify width by more than the rounding of float32, or nothing."""
    if quantize == BNB_INT8:
        return f"bnb-int8 searches all positions of a verify pass for outliers, so {name}'s logits depend on its width"
    if dtype != "float32":
        return f"in {dtype} the rounding of {name}'s logits depends on the verify width"
    return ""


def _is_slow(quantize: str, dtype: str, device: str) -> bool:
    """Whether a CPU unpacks the weights in every forward, which takes longer than to multiply float32 weights."""
    if device != "cpu" or quantize == "none":
        return False
    # Only in bfloat16 is there no loss of time: with int8, and with nf4 where bitsandbytes has a kernel.
    return dtype != "bfloat16" or not (quantize == "int8" or (quantize == "nf4" and has_nf4_kernel()))


def _sizes(model: nn.Module) -> dict[tuple[str, int], int]:
    """Bytes of the model's tensors by device and address."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in (plain for module in model.modules() for held in _tensors(module) for plain in _plain(held)):
        # The address is 0 where accelerate keeps the data elsewhere until it is used.
        key = (str(tensor.device), tensor.data_ptr() or id(tensor))
        # Tensors at one address may be views of different lengths.
        sizes[key] = max(tensor.nbytes, sizes.get(key, 0))
    return sizes


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
    # bitsandbytes keeps scales in objects of its own.
    for state in (getattr(module._parameters.get("weight"), "quant_state", None), getattr(module, "state", None)):
        scales = (getattr(state, name, None) for name in BITSANDBYTES_SCALES)
        yield from (scale for scale in scales if isinstance(scale, Tensor))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or the parts of a composed one: data and scales, or this process' shard."""
    # PyTorch's protocol of tensor subclasses: the names of the attributes that hold the inner tensors come first.
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from _plain(part)
