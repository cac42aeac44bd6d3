"""All layers of a decoder as one list of jobs in machine code, for one number of rows."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from utils.decode.kv_cache import GrowingLayer
from utils.engine import compiled_layers as layers
from utils.engine.compiled_layers import attention_function, row_function
from utils.engine.compiled_products import CompiledKernel
from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm
from utils.engine.machine_code import WORKERS, floats, job_list, words

Product = Sequence[CompiledKernel]  # with the same input, whose outputs lie side by side
_PAST = list(layers.CACHE).index("past")
TABLE_STEP = 64  # rotary tables hold a multiple of this number of positions


class RotaryTables:
    """cos and sin of every position so far, for each rotary table of a decoder."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        self._tables = floats(len(spec.ropes), 2, 0, spec.rotary_dim)

    def rows(self, first: int, end: int) -> Tensor:
        """cos and sin of the positions from `first` up to `end`: (tables, 2, T, rotary_dim)."""
        if (length := self._tables.shape[2]) < end:
            length = max(2 * length, -(-end // TABLE_STEP) * TABLE_STEP)
            self._tables = floats(len(self._spec.ropes), 2, length, self._spec.rotary_dim)
            for own, rope in zip(self._tables, self._spec.ropes, strict=True):
                own[0], own[1] = rope(torch.arange(length))
        return self._tables[:, :, first:end]


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

    states: (1 + kept, rows, hidden), one that the layers change in place, and those that are kept. normed: the output
    of the final norm, (rows, hidden). others: further products that use scratch memory.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        products: Sequence[LayerProducts],
        rows: int,
        *,
        kept: int = 0,
        others: Sequence[Product] = (),
    ) -> None:
        def widest(parts: Iterable[int]) -> Tensor:
            return floats(rows, max(parts, default=1))

        self.rows, self.kept = rows, kept
        self.states = floats(1 + kept, rows, spec.hidden_size)
        self.normed, self.hidden = floats(2, rows, spec.hidden_size)
        self.qkv = widest(_width(layer.qkv) for layer in products)
        self.attended = floats(rows, spec.heads * spec.head_dim)
        self.change = widest(_width(part) for layer in products for part in (layer.output, layer.down))
        self.gates = widest(_width(layer.gate_up) for layer in products)
        self.mixed = widest(layer.down[0].inputs for layer in products)
        self.tables = floats(len(spec.ropes), 2, rows, spec.rotary_dim)
        every = [*others, *(part for own in products for part in (own.qkv, own.output, own.gate_up, own.down))]
        self.scratch = floats(max((kernel.scratch_size(rows) for part in every for kernel in part), default=0))


class DecoderProgram:
    """The layers for rows (batch * count). Other programs overwrite the same buffers.

    states: the input of each layer and the output of the last one, each (rows, hidden). After a run only those in
    `kept` are what they are called, because a layer whose output is not kept changes its input.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        products: Sequence[LayerProducts],
        buffers: Buffers,
        *,
        batch: int,
        count: int,
        kept: Collection[int] = (),
    ) -> None:
        self._spec, self._own_products, self._batch, self._count, rows = spec, products, batch, count, batch * count
        own = iter(buffers.states[1:, :rows])
        self.states = [next(own) if number in kept else buffers.states[0, :rows] for number in range(len(products) + 1)]
        self.normed, self.qkv, self.attended = buffers.normed[:rows], buffers.qkv[:rows], buffers.attended[:rows]
        self._hidden, self._change = buffers.hidden[:rows], buffers.change[:rows]
        self._gates, self._mixed, self._scratch = buffers.gates[:rows], buffers.mixed[:rows], buffers.scratch
        self._tables = buffers.tables[:, :, :rows].unflatten(2, (batch, count))
        self._jobs: list[tuple[int, Any, int]] = []
        self._caches: list[list[tuple[Any, Any]]] = []  # arguments of stores and attention by layer and sequence
        self._memories: list[object] = [None] * len(products)  # that these arguments name
        self._last_attention = 0  # its first job
        self._add_jobs()
        self._list, _ = job_list(self._jobs)

    def follow(self, past: int, rotary: RotaryTables, caches: Sequence[GrowingLayer]) -> None:
        """Let the rows follow `past` positions, which the layers have in these caches."""
        self._tables.copy_(rotary.rows(past, past + self._count).unsqueeze(2))
        heads = self._batch, self._spec.kv_heads, self._count, self._spec.head_dim
        # A cut of the first layers may have a whole cache.
        for index, (own, cache) in enumerate(zip(self._caches, caches, strict=False)):
            keys, values = cache.extended(heads)  # (batch, groups, capacity, D)
            if cache.memory is not self._memories[index]:
                self._memories[index] = cache.memory
                start, other, step, stride = keys.data_ptr(), values.data_ptr(), 4 * keys.stride(0), keys.stride(1)
                for store, attend in own:
                    store[:_PAST] = attend[:_PAST] = start, other, stride
                    start, other = start + step, other + step
            for store, attend in own:
                store[_PAST] = attend[_PAST] = past

    def run(self, *, fills: bool = False) -> None:
        """Compute all layers. fills: only what the caches need, without the attention of the last layer."""
        count = self._last_attention if fills else len(self._jobs)
        WORKERS.run(self._list, count)

    def _add(self, name: str, kinds: Any, rows: int, **values: Any) -> None:
        self._jobs.append((row_function(name), words(kinds, **values), rows))

    def _add_jobs(self) -> None:
        for index, (layer, own) in enumerate(zip(self._spec.layers, self._own_products, strict=True)):
            x, after = self.states[index : index + 2]
            self._add_layer(layer, own, self._norm(layer.input_norm, x, self._hidden), x=x, after=after)
        self._norm(self._spec.final_norm, self.states[-1], self.normed)

    def _add_layer(self, layer: LayerSpec, own: LayerProducts, given: Tensor, *, x: Tensor, after: Tensor) -> None:
        """after = the layer of `given`, what its attention reads, and x, what is added to its output."""
        spec, rows = self._spec, self._batch * self._count
        self._product(own.qkv, given, self.qkv)
        for norm, first, heads in ((layer.query_norm, 0, spec.heads), (layer.key_norm, spec.heads, spec.kv_heads)):
            part = self.qkv[:, first * spec.head_dim :]
            self._norm(norm, part, part, columns=heads * spec.head_dim)
        if layer.rope is not None and spec.rotary_dim:
            cos, sin = self._tables[layer.rope]
            self._add(
                "rotate", layers.ROTATE, rows, x=self.qkv, x_stride=self.qkv.shape[1], heads=spec.heads + spec.kv_heads,
                size=spec.head_dim, half=spec.rotary_dim // 2, cos=cos, sin=sin,
            )  # fmt: skip
        self._add_attention(layer)
        self._product(own.output, self.attended, self._change)
        self._add_change(layer.attention_output_norm, x, after, scale=layer.residual_scale)
        self._product(own.gate_up, self._norm(layer.mlp_norm, after, self._hidden), self._gates)
        gates, size = self._gates, own.down[0].inputs
        name = f"gate_{layer.activation}"
        self._add(name, layers.GATE, rows, x=gates, x_stride=gates.shape[1], out=self._mixed, size=size)
        self._product(own.down, self._mixed, self._change)
        self._add_change(layer.mlp_output_norm, after, after, scale=layer.residual_scale)

    def _add_change(self, norm: Norm | None, x: Tensor, out: Tensor, *, scale: float) -> None:
        """out = x + scale * norm(change)."""
        change, size = self._norm(norm, self._change, self._hidden), self._spec.hidden_size
        self._add(
            "add", layers.ADD, len(x), x=x, out=out, change=change, change_stride=change.stride(0), size=size,
            scale=scale,
        )  # fmt: skip

    def _product(self, product: Product, x: Tensor, out: Tensor) -> None:
        column = 0
        for kernel in product:
            self._jobs += kernel.jobs(x, out[:, column:], len(x), stride=out.stride(0), scratch=self._scratch)
            column += kernel.outputs

    def _norm(self, norm: Norm | None, x: Tensor, out: Tensor, *, columns: int = 0) -> Tensor:
        """The tensor that holds the norm of x. columns: of several heads, each as wide as the weight."""
        if norm is None:
            return x
        size = norm.weight.numel()
        self._add(
            "norm", layers.NORM, len(x), x=x, x_stride=x.stride(0), weight=norm.weight, out=out,
            out_stride=out.stride(0), heads=max(1, columns // size), size=size, eps=norm.eps,
        )  # fmt: skip
        return out

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


def products_of(model: nn.Module, spec: DecoderSpec) -> list[LayerProducts]:
    """The products of each layer of a model whose linear layers are compiled kernels."""
    return [
        LayerProducts(
            product_of(model, layer.query, layer.key, layer.value),
            product_of(model, layer.output),
            product_of(model, layer.gate, layer.up),
            product_of(model, layer.down),
        )
        for layer in spec.layers
    ]


def product_of(model: nn.Module, *linears: Linear) -> Product:
    """One product for layers that read the same input. Fused parameters and fused kernels are one kernel already."""
    modules: Any = [model.get_submodule(linear.name.partition("[")[0]) for linear in linears]
    return [*dict.fromkeys(module.kernel for module in modules)]


def _width(product: Product) -> int:
    """Columns that a product writes, those of its last block included."""
    return sum(kernel.outputs for kernel in product[:-1]) + product[-1].width
