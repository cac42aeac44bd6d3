"""OpenVINO graphs of the parts of a decoder outside attention, from a DecoderSpec: see `utils.engine.segments`.

Each graph takes any number of rows. Rotary positions are inputs, so that nothing in a graph depends on the length of
the context. The weights of a graph are read when it is built.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Linear, Norm
from utils.engine.openvino_runtime import DYNAMIC_GROUP, FLOAT, ops, ov, sizes
from utils.engine.openvino_weights import Constants
from utils.engine.weight_blocks import BlockWeight
from utils.engine.weight_format import EngineWeights

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
