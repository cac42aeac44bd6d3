"""The parts of a decoder outside attention, computed by PyTorch with the kernels of `utils.engine.kernels`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from utils.engine.decoder_spec import ACTIVATIONS, DecoderSpec, LayerSpec, Norm

Product = Callable[[Tensor], Tensor]  # (rows, K) -> (rows, N)


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """The products of one layer. qkv, gate_up: of fused weights, in this order."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product


class TorchSegments:
    """`Segments` over products. norms: the spec, of which only norms, sizes and scales are read.

    weight_bytes: counts what the products keep in memory.
    """

    def __init__(
        self, spec: DecoderSpec, products: Sequence[LayerProducts], head: Product, weight_bytes: Callable[[], int]
    ) -> None:
        self._spec, self._products, self._head, self._weight_bytes = spec, list(products), head, weight_bytes

    def begin(self, x: Tensor, cos: Tensor, sin: Tensor, *, prefill: bool) -> Tensor:
        return self._qkv(0, x, cos, sin)

    def advance(
        self, layer: int, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor, *, prefill: bool
    ) -> tuple[Tensor, Tensor | None]:
        spec, products = self._spec.layers[layer], self._products[layer]
        x = _add(x, _norm(spec.attention_output_norm, products.output(attended)), spec.residual_scale)
        gate, up = products.gate_up(_norm(spec.mlp_norm, x)).chunk(2, dim=-1)
        mixed = products.down(ACTIVATIONS[spec.activation](gate) * up)
        x = _add(x, _norm(spec.mlp_output_norm, mixed), spec.residual_scale)
        last = layer + 1 == len(self._products)
        return x, None if last else self._qkv(layer + 1, x, cos, sin)

    def logits(self, x: Tensor, *, prefill: bool) -> Tensor:
        return self._head(x)

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def nbytes(self) -> int:
        return self._weight_bytes()

    def _qkv(self, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        spec, layer = self._spec, self._spec.layers[index]
        y = self._products[index].qkv(_norm(layer.input_norm, x))
        y = y.view(len(x), -1, spec.head_dim)  # (rows, heads + 2 * kv_heads, D)
        if layer.query_norm is not None or layer.key_norm is not None:
            y = self._with_norms(layer, y)
        if layer.rope is None:
            return y
        rotated = spec.heads + spec.kv_heads
        turned = _rotate(y[:, :rotated], cos[:, None], sin[:, None])
        return torch.cat([turned, y[:, rotated:]], dim=1)

    def _with_norms(self, layer: LayerSpec, y: Tensor) -> Tensor:
        query, key, value = y.split([self._spec.heads, self._spec.kv_heads, self._spec.kv_heads], dim=1)
        return torch.cat([_head_norm(layer.query_norm, query), _head_norm(layer.key_norm, key), value], dim=1)


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def _head_norm(norm: Norm | None, x: Tensor) -> Tensor:
    """x: (rows, heads, D). A weight of D values is for each head, a longer one for all heads together."""
    if norm is None:
        return x
    return _norm(norm, x) if norm.weight.numel() == x.shape[-1] else _norm(norm, x.flatten(1)).view_as(x)


def _add(x: Tensor, change: Tensor, scale: float) -> Tensor:
    return x + change if scale == 1.0 else torch.add(x, change, alpha=scale)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (rows, heads, D), cos and sin: (rows, 1, R). The first R values of each head are rotated in halves."""
    size = cos.shape[-1]
    part = x[..., :size]
    # concat(-x2, x1) * sin is the rolled vector times sin with a changed sign in its first half.
    low, high = sin.chunk(2, dim=-1)
    turned = torch.addcmul(part * cos, part.roll(size // 2, dims=-1), torch.cat([-low, high], dim=-1))
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], dim=-1)
