"""OpenVINO graphs of the parts of a decoder outside attention, from a DecoderSpec: see `Segments`.

Each graph takes any number of rows. Rotary positions are inputs, so that nothing in a graph depends on the length of
the context. The weights of a graph are read when it is built.

With VNNI instructions OpenVINO multiplies integer weights with inputs that it rounds to int8, with one scale for each
group of inputs of a row. Only weights without an offset, or with one integer offset per group, keep the bits of a row
independent of the other rows. So values are stored around zero, and what a group's minimum adds is a small second
product with the sums of the inputs of each group. Without these instructions OpenVINO unpacks weights to float32 while
it multiplies, and does not round inputs.

OpenVINO is imported without its telemetry. Only modules that are imported when the engine is used import this one.
"""

import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm
from utils.engine.machine import has_integer_products
from utils.engine.weight_blocks import BlockWeight, joined
from utils.engine.weight_format import EngineWeights


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Make imports of the telemetry client fail, so that OpenVINO's stub takes its place. The client would report the
    import itself.
    """
    name = "openvino_telemetry"
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


with _without_telemetry():
    import openvino as ov
    from openvino import opset13 as ops

__all__ = ["DYNAMIC_GROUP", "FLOAT", "Constants", "Form", "GraphBuilder", "compile_graph", "ops", "ov", "sizes"]

FLOAT = ov.Type.f32
# Of more inputs, unpacked weights are added up in two ways: one for up to four rows, and another one for more.
UNPACKED_INPUTS = 4096
DYNAMIC_GROUP = 32  # inputs that share one scale when they are rounded to int8


@cache
def core() -> Any:
    """Return the one OpenVINO runtime of this process."""
    return ov.Core()


def compile_graph(graph: Any, threads: int, *, group: int = DYNAMIC_GROUP, bfloat16: bool = False) -> Any:
    """Compile a graph for the CPU. group: how many inputs may share a scale when they are rounded."""
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # threads that may move lose less time beside other programs
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group if has_integer_products() else 0,
    }
    return core().compile_model(graph, "CPU", settings)


def sizes(*values: int) -> Any:
    """Return a node with integers, such as a shape."""
    return ops.constant(np.array(values, dtype=np.int64))


Form = Tensor | BlockWeight  # in which a layer's weight is computed
SHARED = 1 << 16  # bytes from which a constant is not copied by OpenVINO


class Constants:
    """The weights of one graph, in memory that can be returned once OpenVINO has them in its own layout.

    A compiled graph keeps the constants that it was made from, but reads them only until it has packed them. So their
    pages are returned, and their addresses stay reserved, after the graph was compiled and has run.
    """

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._tensors: list[Any] = []  # of OpenVINO, which nodes do not keep
        self.nbytes = 0  # what the graph holds of them in its own layout

    def drop(self) -> None:
        """Return the memory. The graph must have run, and must not be compiled again."""
        for part in self._maps:
            part.madvise(mmap.MADV_DONTNEED)

    def product(self, x: Any, forms: Sequence[Form], biases: Sequence[Tensor | None]) -> Any:
        """The node x @ W^T + b for the weights of layers that read x, their outputs one after the other."""
        blocks = [form for form in forms if isinstance(form, BlockWeight)]
        whole = joined(blocks) if len(blocks) == len(forms) else None
        if whole is not None:
            y = self.multiplied(x, whole)
        elif blocks:
            y = ops.concat([self.multiplied(x, form) for form in forms], 1)
        else:
            y = ops.matmul(x, self._floats([form for form in forms if isinstance(form, Tensor)]), False, True)
        if all(bias is None for bias in biases):
            return y
        pairs = zip(forms, biases, strict=True)
        rows = [torch.zeros(form.shape[0]) if bias is None else bias.detach().float() for form, bias in pairs]
        return ops.add(y, ops.constant(torch.cat(rows)[None].numpy()))

    def multiplied(self, x: Any, weight: Form) -> Any:
        """The node x @ W^T."""
        if isinstance(weight, Tensor):
            return ops.matmul(x, self._floats([weight]), False, True)
        if (size := _inputs_at_once(weight)) < weight.shape[1]:
            starts = range(0, weight.shape[1], size)
            return reduce(
                ops.add,
                (self.multiplied(_part(x, at, at + size), weight.columns(at, at + size)) for at in starts),
            )
        y = ops.matmul(x, self._centred(weight), False, True)
        offsets = _offsets(weight)
        if offsets is None:
            return y
        groups = ops.reshape(x, sizes(-1, weight.shape[1] // weight.group, weight.group), False)
        sums = ops.reduce_sum(groups, sizes(2), False)
        return ops.add(y, ops.matmul(sums, self._floats([offsets]), False, True))

    def _floats(self, weights: Sequence[Tensor]) -> Any:
        """A node with weights (N, K) row below row, in float32, whatever their own format is."""
        total = sum(len(weight) for weight in weights)
        whole, start = self._memory((total, weights[0].shape[1]), torch.float32), 0
        for weight in weights:
            whole[start : start + len(weight)] = weight.detach()
            start += len(weight)
        return ops.constant(whole.numpy(), shared_memory=True)

    def _centred(self, weight: BlockWeight) -> Any:
        """The node (values - centre) * scales, shape (N, K)."""
        rows, inputs = weight.shape
        # Integers of 8 bits wrap around, so that unsigned ones become what they are above the centre.
        signed = weight.values.view(torch.int8)
        signed = signed - _centre(weight) if _centre(weight) else signed
        shape = (rows, inputs) if weight.group == inputs else (rows, inputs // weight.group, weight.group)
        integers = self._integers(signed.reshape(shape), four_bits=weight.bits <= 4)
        scales = self._memory((*shape[:-1], 1), torch.float32)
        scales[:] = weight.scales.reshape(scales.shape)
        scaled = ops.multiply(ops.convert(integers, FLOAT), ops.constant(scales.numpy(), shared_memory=True))
        return scaled if len(shape) == 2 else ops.reshape(scaled, sizes(rows, inputs), False)

    def _integers(self, values: Tensor, *, four_bits: bool) -> Any:
        if not four_bits:
            whole = self._memory(values.shape, torch.int8)
            whole[:] = values
            return ops.constant(whole.numpy(), shared_memory=True)
        nibbles = values.reshape(-1, 2).view(torch.uint8) & 15
        bits = self._memory((len(nibbles),), torch.uint8)
        torch.bitwise_or(nibbles[:, 0], nibbles[:, 1] << 4, out=bits)
        # A type that numpy lacks.
        tensor = ov.Tensor(bits.numpy(), ov.Shape(list(values.shape)), ov.Type.i4)
        self._tensors.append(tensor)
        return ops.constant(tensor, shared_memory=True)

    def _memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in a mapping of its own, in huge pages where the system has them: they are filled much faster."""
        count = int(np.prod(shape))
        self.nbytes += count * dtype.itemsize
        if not hasattr(mmap, "MADV_DONTNEED") or count * dtype.itemsize < SHARED:
            made = torch.empty(*shape, dtype=dtype)
            self._tensors.append(made)
            return made
        part = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # not every system has them
            part.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(part)
        return torch.frombuffer(part, dtype=dtype).view(*shape)


def _inputs_at_once(weight: BlockWeight) -> int:
    """How many inputs a product of small integers may add up: equal parts of few enough, or all of them."""
    inputs, step = weight.shape[1], 1 if weight.group == weight.shape[1] else max(weight.group, DYNAMIC_GROUP)
    if has_integer_products():
        return inputs
    parts = range(-(-inputs // UNPACKED_INPUTS), inputs // step + 1)
    return next((inputs // count for count in parts if inputs % (count * step) == 0), inputs)


def _centre(weight: BlockWeight) -> int:
    return 0 if weight.values.dtype is torch.int8 else 1 << (weight.bits - 1)


def _offsets(weight: BlockWeight) -> Tensor | None:
    """What is added to the centred weights of each group, (N, K / group), or None if it is zero everywhere."""
    offsets = weight.scales.float() * _centre(weight)
    if weight.minimums is not None:
        offsets = offsets + weight.minimums.float()
    return offsets if bool(offsets.any()) else None


ACTIVATIONS = {
    "silu": ops.swish,
    "gelu": lambda x: ops.gelu(x, "ERF"),
    "gelu_pytorch_tanh": lambda x: ops.gelu(x, "TANH"),
    "relu": ops.relu,
}


class GraphBuilder:
    """Builds one graph of a decoder. constants: what it reads of the weights."""

    def __init__(self, spec: DecoderSpec, weights: EngineWeights) -> None:
        self.spec, self.constants, self._weights = spec, Constants(), weights
        self.group = DYNAMIC_GROUP  # how many inputs may share a scale in all products of the graph

    def build(self, index: int) -> Any:
        """Graph 0 begins, graph i + 1 is that of layer i, the last one is the output head."""
        if not index:
            return self.begin()
        return self.head() if index > len(self.spec.layers) else self.advance(index - 1)

    def begin(self) -> Any:
        """x, cos, sin -> qkv of layer 0."""
        x, tables = _input(self.spec.hidden_size), self._tables(0)
        return self._graph([self._qkv(x, 0, tables)], [x, *tables])

    def advance(self, layer: int) -> Any:
        """x, attended, cos, sin -> x, qkv of the next layer. The last layer has neither tables nor qkv."""
        x, attended = _input(self.spec.hidden_size), _input(self.spec.heads * self.spec.head_dim)
        y = self._after_attention(x, attended, self.spec.layers[layer])
        if layer + 1 == len(self.spec.layers):
            return self._graph([y], [x, attended])
        tables = self._tables(layer + 1)
        return self._graph([y, self._qkv(y, layer + 1, tables)], [x, attended, *tables])

    def head(self) -> Any:
        """x -> logits."""
        x = _input(self.spec.hidden_size)
        return self._graph([self._product(x, [self.spec.head])], [x])

    def _graph(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return ov.Model(list(outputs), list(inputs), "segment")

    def _tables(self, layer: int) -> list[Any]:
        """Inputs for the cosines and sines of a layer, if it has any."""
        return [] if self.spec.layers[layer].rope is None else [_input(self.spec.rotary_dim) for _ in range(2)]

    def _product(self, x: Any, linears: Sequence[Linear]) -> Any:
        """The node x @ W^T + b for all layers that read x, their outputs one after the other."""
        forms = [self._form(linear) for linear in linears]
        self.group = min([self.group, *(form.group for form in forms if isinstance(form, BlockWeight))])
        return self.constants.product(x, forms, [linear.bias for linear in linears])

    def _form(self, linear: Linear) -> Tensor | BlockWeight:
        """A weight as OpenVINO computes it. What its integer products do not fit stays float32."""
        form = self._weights.form(linear.name, linear.weight, is_head=linear is self.spec.head)
        return form if not isinstance(form, BlockWeight) or _fits(form) else form.dense()

    def _qkv(self, x: Any, index: int, tables: Sequence[Any]) -> Any:
        """Queries, keys and values of a layer for x (rows, hidden): (rows, heads + 2 * kv_heads, head_dim)."""
        spec, layer = self.spec, self.spec.layers[index]
        h = x if layer.input_norm is None else _rms(x, layer.input_norm)
        qkv = self._product(h, [layer.query, layer.key, layer.value])
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        if layer.query_norm is None and layer.key_norm is None:
            rotated, values = _heads(_part(qkv, 0, width + kv_width), spec), _part(qkv, width + kv_width, None)
        else:
            queries = self._normed(_part(qkv, 0, width), layer.query_norm)
            keys = self._normed(_part(qkv, width, width + kv_width), layer.key_norm)
            rotated, values = ops.concat([queries, keys], 1), _part(qkv, width + kv_width, None)
        if tables:
            rotated = _rotate(rotated, tables, spec)
        return ops.concat([rotated, _heads(values, spec)], 1)

    def _normed(self, x: Any, norm: Norm | None) -> Any:
        """Normalize queries or keys over each head, or over all heads: (rows, heads, head_dim)."""
        if norm is None:
            return _heads(x, self.spec)
        if norm.weight.numel() == self.spec.head_dim:
            return _rms(_heads(x, self.spec), norm)
        return _heads(_rms(x, norm), self.spec)

    def _after_attention(self, x: Any, attended: Any, layer: LayerSpec) -> Any:
        a = self._product(attended, [layer.output])
        x = _add(x, a, layer.attention_output_norm, layer.residual_scale)
        h = x if layer.mlp_norm is None else _rms(x, layer.mlp_norm)
        both, width = self._product(h, [layer.gate, layer.up]), len(layer.gate.weight)
        activated = ops.multiply(ACTIVATIONS[layer.activation](_part(both, 0, width)), _part(both, width, None))
        return _add(x, self._product(activated, [layer.down]), layer.mlp_output_norm, layer.residual_scale)


def _fits(block: BlockWeight) -> bool:
    """Whether OpenVINO has integer products for groups of this size."""
    return block.shape[1] % DYNAMIC_GROUP == 0 and (block.group % DYNAMIC_GROUP == 0 or block.group == 16)


def _input(size: int) -> Any:
    return ops.parameter(ov.PartialShape([-1, size]), FLOAT)


def _part(x: Any, start: int, end: int | None, axis: int = 1) -> Any:
    stop = np.iinfo(np.int64).max if end is None else end
    return ops.slice(x, sizes(start), sizes(stop), sizes(1), sizes(axis))


def _heads(x: Any, spec: DecoderSpec) -> Any:
    return ops.reshape(x, sizes(0, -1, spec.head_dim), True)


def _rms(x: Any, norm: Norm) -> Any:
    mean = ops.reduce_mean(ops.multiply(x, x), sizes(-1), True)
    scaled = ops.divide(x, ops.sqrt(ops.add(mean, ops.constant(np.float32(norm.eps)))))
    return ops.multiply(scaled, ops.constant(norm.weight.detach().float().numpy()))


def _add(x: Any, y: Any, norm: Norm | None, scale: float) -> Any:
    """x + scale * norm(y)."""
    y = y if norm is None else _rms(y, norm)
    return ops.add(x, y if scale == 1 else ops.multiply(y, ops.constant(np.float32(scale))))


def _rotate(x: Any, tables: Sequence[Any], spec: DecoderSpec) -> Any:
    """Rotate the first rotary_dim values of each head of x (rows, heads, head_dim) in halves."""
    size = spec.rotary_dim
    cos, sin = (ops.unsqueeze(table, sizes(1)) for table in tables)
    turned = x if size == spec.head_dim else _part(x, 0, size, 2)
    first, second = _part(turned, 0, size // 2, 2), _part(turned, size // 2, size, 2)
    halves = ops.concat([ops.negative(second), first], 2)
    turned = ops.add(ops.multiply(turned, cos), ops.multiply(halves, sin))
    return turned if size == spec.head_dim else ops.concat([turned, _part(x, size, None, 2)], 2)
