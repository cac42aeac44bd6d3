"""The number format and the size of weights that are held as tensors of a model."""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from utils.engine.module_swap import EngineLinear


def weight_format(model: PreTrainedModel) -> str:
    """Return the number format of a model's weights as loaded: "float32", "bfloat16", ... or "quantized"."""
    dtype = next(model.parameters()).dtype
    return "quantized" if getattr(model, "is_quantized", False) else str(dtype).removeprefix("torch.")


def tensor_bytes(parts: Iterable[nn.Module]) -> int:
    """Return the bytes of all parameters, buffers and kernels. Those that several modules share count once, and those
    without data not at all.
    """
    tensors = {id(tensor): tensor for part in parts for module in part.modules() for tensor in _tensors(module)}
    return sum(tensor.nbytes for tensor in tensors.values() if not tensor.is_meta)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
    if isinstance(module, EngineLinear):
        yield from (*module.fused.kernel.tensors(), *(tensor for tensor in module.original if tensor is not None))
