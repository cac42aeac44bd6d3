"""The parts of a decoder outside attention, computed by PyTorch with the kernels of `utils.engine.kernels`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from utils.engine.decoder_spec import ACTIVATIONS, DecoderSpec, LayerSpec, Linear, Norm
from utils.engine.kernels import PREFILL_SIZES
from utils.engine.compiled_decoder import LayerProducts
from utils.engine.module_swap import EngineLinear

Product = Callable[[Tensor], Tensor]  # (rows, K) -> (rows, N)


@dataclass(frozen=True, slots=True)
class LayerProductsOld:
    """The products of one layer. qkv, gate_up: of fused weights, in this order."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product


class TorchSegments:
    """`Segments` over products. Of the spec only norms, sizes and scales are read, not the weights."""

    row_threads: int | None = 1

    def __init__(
        self,
        spec: DecoderSpec,
        products: Sequence[LayerProducts],
        head: Product,
        *,
        prefill_rows: Sequence[int] = PREFILL_SIZES,
    ) -> None:
        self.prefill_rows = prefill_rows
        self._spec, self._products, self._head = spec, list(products), head
        self._sin, self._signed = torch.empty(0), torch.empty(0)

    def begin(self, x: Tensor, *, cos: Tensor, sin: Tensor, prefill: bool) -> Tensor:
        return self._qkv(0, x, cos, sin)

    def advance(
        self, layer: int, x: Tensor, attended: Tensor, *, cos: Tensor, sin: Tensor, prefill: bool
    ) -> tuple[Tensor, Tensor | None]:
        spec, products = self._spec.layers[layer], self._products[layer]
        x = _add(x, _norm(spec.attention_output_norm, products.output(attended)), spec.residual_scale)
        gate, up = products.gate_up(_norm(spec.mlp_norm, x)).chunk(2, dim=-1)
        mixed = products.down(ACTIVATIONS[spec.activation](gate).mul_(up))
        x = _add(x, _norm(spec.mlp_output_norm, mixed), spec.residual_scale)
        last = layer + 1 == len(self._products)
        return x, None if last else self._qkv(layer + 1, x, cos, sin)

    def logits(self, x: Tensor) -> Tensor:
        return self._head(x)

    def run_products(self) -> None:
        x = torch.zeros(1, self._spec.hidden_size)
        attended = torch.zeros(1, self._spec.heads * self._spec.head_dim)
        for products in self._products:
            products.qkv(x)
            products.output(attended)
            gate, _ = products.gate_up(x).chunk(2, dim=-1)
            products.down(gate)
        self._head(x)

    def _qkv(self, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        spec, layer = self._spec, self._spec.layers[index]
        y = self._products[index].qkv(_norm(layer.input_norm, x))
        y = y.view(len(x), -1, spec.head_dim)  # (rows, heads + 2 * kv_heads, D)
        if layer.query_norm is not None or layer.key_norm is not None:
            y = self._with_norms(layer, y)
        if layer.rope is None:
            return y
        self._rotate(y[:, : spec.heads + spec.kv_heads], cos, sin)
        return y

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """x: (rows, heads, D). The first values of each head, as many as cos has, are rotated in halves, in place."""
        if sin is not self._sin:
            # concat(-x2, x1) * sin is the rolled vector times sin with a changed sign in its first half.
            low, high = sin.chunk(2, dim=-1)
            self._sin, self._signed = sin, torch.cat([-low, high], dim=-1)[:, None]
        size = cos.shape[-1]
        part = x if size == x.shape[-1] else x[..., :size]
        # Not one fused operation: it rounds differently at the end of a vector register, so bits would depend on rows.
        crossed = part.roll(size // 2, dims=-1).mul_(self._signed)
        part.mul_(cos[:, None]).add_(crossed)

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
    """x + scale * change, in the memory of `change` where that has the same bits."""
    return change.add_(x) if scale == 1.0 else torch.add(x, change, alpha=scale)


def products_of(model: nn.Module, spec: DecoderSpec) -> tuple[list[LayerProducts], Product]:
    """The products of each layer and of the output head, with the layers that the model has now."""
    layers = [
        LayerProducts(
            _product(model, layer.query, layer.key, layer.value),
            _product(model, layer.output),
            _product(model, layer.gate, layer.up),
            _product(model, layer.down),
        )
        for layer in spec.layers
    ]
    head = model.get_output_embeddings()  # type: ignore[operator]  # of a PreTrainedModel
    return layers, head.fused.kernel if isinstance(head, EngineLinear) else head


def _product(model: nn.Module, *linears: Linear) -> Product:
    """One product for layers that read the same input. Fused parameters and fused kernels are one product already."""
    modules = list(dict.fromkeys(model.get_submodule(linear.name.partition("[")[0]) for linear in linears))
    kernels = {id(module.fused): module.fused for module in modules if isinstance(module, EngineLinear)}
    if len(kernels) == 1 and all(isinstance(module, EngineLinear) for module in modules):
        (fused,) = kernels.values()
        if len(fused.sizes) == len(modules):
            return fused.kernel
    return modules[0] if len(modules) == 1 else _Concatenated(modules)


@dataclass(frozen=True, slots=True)
class _Concatenated:
    modules: Sequence[nn.Module]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([module(x) for module in self.modules], dim=-1)
