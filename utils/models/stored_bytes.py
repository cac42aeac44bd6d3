"""The size of a model's weights in memory, in every storage format: plain tensors, those of quanto and bitsandbytes,
and those of the kernels that have replaced them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from utils.engine.module_swap import EngineLinear

BITSANDBYTES_SCALES = ("absmax", "code", "SCB")


def stored_bytes(model: nn.Module, *, besides: nn.Module | None = None) -> int:
    """Bytes of all parameters, buffers, kernels and scales, except those of `besides`. Shared memory counts once."""
    excluded = set() if besides is None else set(_sizes(besides))
    return sum(size for address, size in _sizes(model).items() if address not in excluded)


def _sizes(model: nn.Module) -> dict[tuple[str, int], int]:
    """Bytes of the model's tensors by device and address."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in (plain for module in model.modules() for held in _tensors(module) for plain in _plain(held)):
        if tensor.is_meta:  # an engine holds the weight
            continue
        # No address where oneDNN has its own layout, and 0 where accelerate keeps the data elsewhere until it is used.
        key = (str(tensor.device), (0 if tensor.is_mkldnn else tensor.data_ptr()) or id(tensor))
        # Tensors at one address may be views of different lengths.
        sizes[key] = max(tensor.nbytes, sizes.get(key, 0))
    return sizes


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
    if isinstance(module, EngineLinear):
        yield from (*module.fused.kernel.tensors(), *(tensor for tensor in module.original if tensor is not None))
    # bitsandbytes keeps scales in objects of its own.
    for state in (getattr(module._parameters.get("weight"), "quant_state", None), getattr(module, "state", None)):
        scales = (getattr(state, name, None) for name in BITSANDBYTES_SCALES)
        yield from (scale for scale in scales if isinstance(scale, Tensor))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or the parts of a composed one: data and scales."""
    # PyTorch's protocol of tensor subclasses: the names of the attributes that hold the inner tensors come first.
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from _plain(part)
