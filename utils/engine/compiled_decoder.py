"""All layers of a decoder as one list of jobs in machine code, for one number of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from utils.engine import compiled_layers as layers
from utils.engine.compiled_layers import attention_function, row_function
from utils.engine.compiled_products import CompiledKernel, JoinedKernels
from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm
from utils.engine.machine_code import WORKERS, floats, job_list, words
from utils.engine.module_swap import EngineLinear

Product = CompiledKernel | JoinedKernels


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """The products of one layer. qkv, gate_up: of fused weights, in this order."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product


class Buffers:
    """What the programs of a decoder write, one after the other, for up to so many rows. Memory of rows that no pass
    has is reserved, but never used.

    states: (layers + 1, rows, hidden), the input of each layer and the output of the last one; without `keeps` one
    state that every layer changes. normed: of the last one, (rows, hidden). others: further products that use scratch
    memory.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        products: Sequence[LayerProducts],
        rows: int,
        *,
        keeps: bool,
        others: Sequence[Product] = (),
    ) -> None:
        def widest(parts: Iterable[int]) -> Tensor:
            return floats(rows, max(parts, default=1))

        self.rows, self.keeps = rows, keeps
        self.states = floats(len(products) + 1 if keeps else 1, rows, spec.hidden_size)
        self.normed, self.hidden = floats(2, rows, spec.hidden_size)
        self.qkv = widest(_width(layer.qkv) for layer in products)
        self.attended = floats(rows, spec.heads * spec.head_dim)
        self.change = widest(_width(part) for layer in products for part in (layer.output, layer.down))
        self.gates = widest(_width(layer.gate_up) for layer in products)
        self.mixed = widest(layer.down.inputs for layer in products)
        self.tables = floats(len(spec.ropes), 2, rows, spec.rotary_dim)
        every = [*others, *(part for own in products for part in (own.qkv, own.output, own.gate_up, own.down))]
        self.scratch = floats(max((kernel.scratch_size(rows) for part in every for kernel in _parts(part)), default=0))


class DecoderProgram:
    """The layers for rows (batch * count). Other programs overwrite the same buffers."""

    def __init__(
        self,
        spec: DecoderSpec,
        products: Sequence[LayerProducts],
        buffers: Buffers,
        *,
        batch: int,
        count: int,
        keeps: bool,
    ) -> None:
        self._spec, self._own_products, self._batch, self._count, rows = spec, products, batch, count, batch * count
        self.states = buffers.states[: len(products) + 1 if keeps else 1, :rows]
        self.normed, self.qkv, self.attended = buffers.normed[:rows], buffers.qkv[:rows], buffers.attended[:rows]
        self._hidden, self._change = buffers.hidden[:rows], buffers.change[:rows]
        self._gates, self._mixed, self._scratch = buffers.gates[:rows], buffers.mixed[:rows], buffers.scratch
        self.tables = buffers.tables[:, :, :rows]
        self._jobs: list[tuple[int, Any, int]] = []
        self._caches: list[list[tuple[Any, Any]]] = []  # arguments of stores and attention by layer and sequence
        self._last_attention = 0  # its first job
        self._add_jobs()
        self._list, _ = job_list(self._jobs)

    def bind(self, layer: int, keys: Tensor, values: Tensor, past: int) -> None:
        """Let a layer use a cache (batch, groups, capacity, D) with room for the new rows after `past` positions."""
        start, other, step, stride = keys.data_ptr(), values.data_ptr(), 4 * keys.stride(0), keys.stride(1)
        for store, attend in self._caches[layer]:
            store[: len(layers.CACHE)] = attend[: len(layers.CACHE)] = start, other, stride, past
            start, other = start + step, other + step

    def run(self, *, fills: bool = False) -> None:
        """Compute all layers. fills: only what the caches need, without the attention of the last layer."""
        count = self._last_attention if fills else len(self._jobs)
        WORKERS.run(self._list, count)

    def _add(self, name: str, kinds: Any, rows: int, **values: Any) -> None:
        self._jobs.append((row_function(name), words(kinds, **values), rows))

    def _add_jobs(self) -> None:
        for index, (layer, own) in enumerate(zip(self._spec.layers, self._own_products, strict=True)):
            x = self.states[min(index, len(self.states) - 1)]
            after = self.states[min(index + 1, len(self.states) - 1)]
            self._add_layer(layer, own, self._norm(layer.input_norm, x, self._hidden), x=x, after=after)
        self._norm(self._spec.final_norm, self.states[-1], self.normed)

    def _add_layer(self, layer: LayerSpec, own: LayerProducts, given: Tensor, *, x: Tensor, after: Tensor) -> None:
        """after = the layer of `given`, what its attention reads, and x, what is added to its output."""
        spec, rows = self._spec, self._batch * self._count
        self._product(own.qkv, given, self.qkv)
        for norm, first, heads in ((layer.query_norm, 0, spec.heads), (layer.key_norm, spec.heads, spec.kv_heads)):
            self._head_norm(norm, first, heads)
        if layer.rope is not None and spec.rotary_dim:
            cos, sin = self.tables[layer.rope]
            self._add(
                "rotate", layers.ROTATE, rows, x=self.qkv, x_stride=self.qkv.shape[1], heads=spec.heads + spec.kv_heads,
                size=spec.head_dim, half=spec.rotary_dim // 2, cos=cos, sin=sin,
            )  # fmt: skip
        self._add_attention(layer)
        self._product(own.output, self.attended, self._change)
        change, stride = self._output_norm(layer.attention_output_norm)
        name = "add_in_place" if after is x or after.data_ptr() == x.data_ptr() else "add"
        self._add_change(name, x, after, change=change, stride=stride, scale=layer.residual_scale)
        self._product(own.gate_up, self._norm(layer.mlp_norm, after, self._hidden), self._gates)
        gates, size = self._gates, own.down.inputs
        name = f"gate_{layer.activation}"
        self._add(name, layers.GATE, rows, x=gates, x_stride=gates.shape[1], out=self._mixed, size=size)
        self._product(own.down, self._mixed, self._change)
        change, stride = self._output_norm(layer.mlp_output_norm)
        self._add_change("add_in_place", after, after, change=change, stride=stride, scale=layer.residual_scale)

    def _add_change(self, name: str, x: Tensor, out: Tensor, *, change: Tensor, stride: int, scale: float) -> None:
        size = self._spec.hidden_size
        self._add(
            name, layers.ADD, len(x), x=x, out=out, change=change, change_stride=stride, size=size, scale=scale
        )  # fmt: skip

    def _product(self, product: Product, x: Tensor, out: Tensor) -> None:
        column = 0
        for kernel in _parts(product):
            self._jobs += kernel.jobs(x, out[:, column:], len(x), stride=out.stride(0), scratch=self._scratch)
            column += kernel.outputs

    def _norm(self, norm: Norm | None, x: Tensor, out: Tensor) -> Tensor:
        """The tensor that holds the norm of x."""
        if norm is None:
            return x
        self._add(
            "norm", layers.NORM, len(x), x=x, x_stride=x.stride(0), weight=norm.weight, out=out,
            out_stride=out.stride(0), size=self._spec.hidden_size, eps=norm.eps,
        )  # fmt: skip
        return out

    def _output_norm(self, norm: Norm | None) -> tuple[Tensor, int]:
        """What is added to x, and its stride."""
        if norm is None:
            return self._change, self._change.stride(0)
        return self._norm(norm, self._change, self._hidden), self._spec.hidden_size

    def _head_norm(self, norm: Norm | None, first: int, heads: int) -> None:
        if norm is None:
            return
        size, weight = self._spec.head_dim, norm.weight
        parts = heads if weight.numel() == size else 1  # a weight for each head, or one for all heads together
        self._add(
            "head_norm", layers.HEAD_NORM, len(self.qkv), x=self.qkv[:, first * size :], x_stride=self.qkv.shape[1],
            weight=weight, heads=parts, size=heads * size // parts, eps=norm.eps,
        )  # fmt: skip

    def _add_attention(self, layer: LayerSpec) -> None:
        spec, width = self._spec, self.qkv.shape[1]
        repeats, caches, attends = spec.heads // spec.kv_heads, [], []
        queries = self._count * repeats
        items = 2 * torch.get_num_threads()  # two for each thread, so that several threads have equal shares
        parts = max(-(-queries // layers.QUERIES_AT_ONCE), min(queries, -(-items // spec.kv_heads)))
        for sequence in range(self._batch):
            own = slice(sequence * self._count, (sequence + 1) * self._count)
            qkv = self.qkv[own]
            store = words(
                layers.STORE, x=qkv, x_stride=width, first=spec.heads * spec.head_dim, groups=spec.kv_heads,
                size=spec.head_dim,
            )  # fmt: skip
            attend = words(
                layers.ATTENTION, query=qkv, query_stride=width, out=self.attended[own], heads=spec.heads,
                repeats=repeats, window=layer.window or 0, queries=queries, parts=parts, scaling=layer.scaling,
            )  # fmt: skip
            self._jobs.append((row_function("store"), store, self._count))
            attends.append((attention_function(spec.head_dim), attend, spec.kv_heads * parts))
            caches.append((store, attend))
        self._last_attention = len(self._jobs)
        self._jobs += attends
        self._caches.append(caches)


def products_of(model: nn.Module, spec: DecoderSpec) -> tuple[list[LayerProducts], Product]:
    """The products of each layer and of the output head of a model whose linear layers are compiled kernels."""
    head = model.get_output_embeddings()  # type: ignore[operator]  # of a PreTrainedModel
    return [layer_products(model, layer) for layer in spec.layers], head.fused.kernel


def layer_products(model: nn.Module, layer: LayerSpec) -> LayerProducts:
    """The products of one layer of such a model."""
    return LayerProducts(
        product_of(model, layer.query, layer.key, layer.value),
        product_of(model, layer.output),
        product_of(model, layer.gate, layer.up),
        product_of(model, layer.down),
    )


def product_of(model: nn.Module, *linears: Linear) -> Product:
    """One product for layers that read the same input. Fused parameters and fused kernels are one product already."""
    modules = dict.fromkeys(model.get_submodule(linear.name.partition("[")[0]) for linear in linears)
    kernels = [*dict.fromkeys(cast(EngineLinear, module).fused.kernel for module in modules)]
    return cast(Product, kernels[0]) if len(kernels) == 1 else JoinedKernels(cast(list[CompiledKernel], kernels))


def _parts(product: Product) -> list[CompiledKernel]:
    return product.kernels if isinstance(product, JoinedKernels) else [product]


def _width(product: Product) -> int:
    """Columns that a product writes, those of its last block included."""
    if isinstance(product, CompiledKernel):
        return product.width
    return sum(kernel.outputs for kernel in product.kernels[:-1]) + product.kernels[-1].width
