"""A forward pass of few operations over the buffers of a slot, for decoders that a DecoderSpec describes.

In a CUDA graph each kernel of a decode step takes one or two microseconds, however little it computes. transformers
needs about 50 for a layer, and this pass 13 to 18: projections of the same input are one product, keys and values are
rotated and written together, and query heads with the same keys are rows of one attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.activations import ACT2FN

from utils.engine.decoder_spec import ACTIVATIONS, DecoderSpec, LayerSpec, Linear, Norm
from utils.engine.graph_cache import Outputs, Slot

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {name: ACT2FN[name] for name in ACTIVATIONS}
# Fused attention needs fewer kernels, but reads keys with few threads. On an H100 in bfloat16 it took 26, 99 and 190 us
# a layer at 512, 2,048 and 4,096 keys, and products 12, 21 and 16.
MANY_KEYS = 2048
BY_PRODUCTS = (torch.float32, torch.float64)  # with any number of keys
# Without that of cuDNN, which builds a plan for every shape.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with joined projections. spec: its norms are in the number format in which they multiply."""

    spec: LayerSpec
    qkv: Linear
    gate_up: Linear


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers of a pass read. positions: (T,). masks: (kv_heads, 1, T * group, capacity), by window. rotations:
    cos and signed sin (T, heads, D) of each rotary table, for all heads of a joined projection.
    """

    positions: Tensor
    masks: dict[int | None, Tensor]
    rotations: list[tuple[Tensor, Tensor]]


class SlotDecoder:
    """The forward pass of one model. Its q, k and v weights become views of one tensor, and so do gate and up.

    Attention is computed by products in a slot of many positions, and for models in float32 or float64, for which GPUs
    have no fused kernel on matrix units. Otherwise it is PyTorch's fused attention.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        self._dtype, self._device = spec.embedding.dtype, spec.embedding.device
        self._spec, self._final_norm, self.hidden_size = spec, self._converted(spec.final_norm), spec.hidden_size
        self._layers = [self._joined(layer) for layer in spec.layers]
        self._windows = {layer.window for layer in spec.layers}
        self._groups = spec.heads // spec.kv_heads
        # Which of a table's rows a head of q, k and v uses.
        self._kinds = torch.tensor([0] * (spec.heads + spec.kv_heads) + [1] * spec.kv_heads, device=self._device)
        # By capacity: all positions, and rotary tables. Kept, because a graph does not own the tensors that it reads.
        self._tables: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._zero = torch.zeros((), dtype=self._dtype, device=self._device)

    def prepare(self, slot: Slot) -> None:
        """Make the buffers of a slot."""
        slot.join(len(self._layers), self._spec.kv_heads, self._zero.new_zeros(self._spec.head_dim))

    def pass_over(self, slot: Slot, ids: Tensor, *, hidden: bool, keep: int = 0) -> Callable[[], Outputs]:
        """Return the forward pass over ids (1, T) at slot.position: logits (1, keep or T, V), and with `hidden` the
        states (1, T, hidden) that transformers returns, and the input of the final norm.
        """
        columns, tables = self._tables_of(slot.capacity)

        def run() -> Outputs:
            with sdpa_kernel(BACKENDS):
                shared = self._shared(slot.position + columns[: ids.shape[1]], columns, tables)
                return self._run(slot, ids, shared, hidden=hidden, keep=keep)

        return run

    def _run(self, slot: Slot, ids: Tensor, shared: _Pass, *, hidden: bool, keep: int) -> Outputs:
        spec, states = self._spec, []
        x = F.embedding(ids[0], spec.embedding)  # (T, hidden)
        if spec.embedding_scale != 1.0:
            x = x * spec.embedding_scale
        for layer, pair in zip(self._layers, slot.pairs, strict=True):
            if hidden:
                states.append(x)
            given = normed(layer.spec.input_norm, x)
            x = self._attended(layer, x, pair, shared, given=given, in_place=not hidden)
            x = self._with_mlp(layer, x)
        unnormed = x
        x = normed(self._final_norm, x if hidden else x[-keep:])
        logits = spec.scaled(F.linear(x[-keep:], spec.head.weight, spec.head.bias))
        return (logits[None], *(state[None] for state in ([*states, x, unnormed] if hidden else ())))

    def _attended(
        self, layer: _Layer, x: Tensor, pair: Tensor, shared: _Pass, *, given: Tensor, in_place: bool
    ) -> Tensor:
        """x (T, hidden) plus the attention of a layer to `given` (T, N). Its keys and values are written to `pair`."""
        spec, count, size = self._spec, len(x), self._spec.head_dim
        y = self._rotated(layer, given, shared)  # (T, heads of q, k and v, D)
        new = y[:, spec.heads :].unflatten(1, (2, spec.kv_heads)).permute(1, 2, 0, 3)  # (2, kv_heads, T, D)
        pair.index_copy_(2, shared.positions, new)
        query = y[:, : spec.heads].unflatten(1, (spec.kv_heads, self._groups)).transpose(0, 1)
        # Heads that share keys are rows, and the others a batch, whose results lie side by side.
        query = query.reshape(spec.kv_heads, 1, count * self._groups, size)
        mask, scale = shared.masks[layer.spec.window], layer.spec.scaling
        if self._dtype in BY_PRODUCTS or pair.shape[2] >= MANY_KEYS:
            attended = _attended_by_products(query[:, 0], pair, mask[:, 0], scale)
        else:
            keys, values = pair.unsqueeze(2)  # (kv_heads, 1, capacity, D)
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        attended = attended.reshape(spec.kv_heads, count, -1).transpose(0, 1).reshape(count, -1)
        return _added(layer.spec, x, (layer.spec.output, attended, layer.spec.attention_output_norm), in_place)

    def _rotated(self, layer: _Layer, given: Tensor, shared: _Pass) -> Tensor:
        """Queries, keys and values (T, heads, D) with positions. A value is multiplied by cos = 1 and sin = 0."""
        spec, own = self._spec, layer.spec
        y = F.linear(given, layer.qkv.weight, layer.qkv.bias)
        if own.query_norm is not None or own.key_norm is not None:
            query, key, value = y.split([count * spec.head_dim for count in (spec.heads, *[spec.kv_heads] * 2)], dim=-1)
            y = torch.cat([normed(own.query_norm, query), normed(own.key_norm, key), value], dim=-1)
        y = y.view(len(given), -1, spec.head_dim)
        if own.rope is None:
            return y
        (cos, sin), half, end = shared.rotations[own.rope], spec.rotary_dim // 2, spec.rotary_dim
        parts = [y[..., half:end], y[..., :half], y[..., end:]]
        return (y * cos).addcmul_(torch.cat(parts if end < spec.head_dim else parts[:2], dim=-1), sin)

    def _with_mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        """x (T, hidden) after the MLP of a layer."""
        spec = layer.spec
        gate, up = F.linear(normed(spec.mlp_norm, x), layer.gate_up.weight, layer.gate_up.bias).chunk(2, dim=-1)
        inner = FUNCTIONS[spec.activation](gate).mul_(up)
        return _added(spec, x, (spec.down, inner, spec.mlp_output_norm), True)

    def _shared(self, positions: Tensor, columns: Tensor, tables: list[Tensor]) -> _Pass:
        """What a pass at these positions shares."""
        masks, shape = dict[int | None, Tensor](), (self._spec.kv_heads, len(positions), self._groups, len(columns))
        for window in self._windows:
            allowed = columns <= positions[:, None]  # (T, capacity)
            if window is not None:
                allowed &= columns > positions[:, None] - window
            mask = self._zero.expand(allowed.shape).masked_fill(~allowed, -torch.inf)
            masks[window] = mask[:, None].expand(shape).reshape(shape[0], 1, -1, shape[3])
        rows = [table.index_select(0, positions).index_select(2, self._kinds) for table in tables]
        return _Pass(positions, masks, [(each[:, 0], each[:, 1]) for each in rows])

    def _tables_of(self, capacity: int) -> tuple[Tensor, list[Tensor]]:
        """All positions, and rotary tables (capacity, 2, 2, D): cos and signed sin, of heads with positions and of
        those without.
        """
        if capacity not in self._tables:
            positions = torch.arange(capacity, device=self._device)
            self._tables[capacity] = positions, [self._table(*rope(positions)) for rope in self._spec.ropes]
        return self._tables[capacity]

    def _table(self, cos: Tensor, sin: Tensor) -> Tensor:
        end, half = self._spec.rotary_dim, self._spec.rotary_dim // 2
        table = self._zero.new_zeros((len(cos), 2, 2, self._spec.head_dim))
        table[:, 0] = 1
        table[:, 0, 0, :end] = cos
        table[:, 1, 0, :half], table[:, 1, 0, half:end] = -sin[:, :half], sin[:, half:]
        return table

    def _joined(self, layer: LayerSpec) -> _Layer:
        qkv, gate_up = joined([layer.query, layer.key, layer.value]), joined([layer.gate, layer.up])
        return _Layer(layer.with_parts(Norm, self._converted), qkv, gate_up)

    def _converted(self, norm: Norm) -> Norm:
        """A norm in the model's number format if that holds its weight; another one is computed in float32."""
        weight = norm.weight.to(self._dtype)
        return replace(norm, weight=weight) if torch.equal(weight.to(norm.weight.dtype), norm.weight) else norm


def _attended_by_products(query: Tensor, pair: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of query (heads, rows, D) over a pair of keys and values (2, heads, T, D). mask: (heads, rows, T)."""
    scores = torch.baddbmm(mask, query, pair[0].transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(dim=-1), pair[1])


def joined(linears: Sequence[Linear]) -> Linear:
    """Layers with the same input as one. Their weights become views of its weight, so that none is held twice."""
    weights = [linear.weight for linear in linears]
    whole = _neighbours(weights)
    if whole is None:
        whole = torch.cat([weight.detach() for weight in weights])
        for weight, rows in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
            weight.data = rows
    bias = None
    if any(linear.bias is not None for linear in linears):
        parts = ((linear.bias, whole.new_zeros(len(linear.weight))) for linear in linears)
        bias = torch.cat([zeros if own is None else own.detach() for own, zeros in parts])
    return Linear("", whole, bias)


def _neighbours(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights as one tensor if they already lie behind each other in memory."""
    first = weights[0].detach()
    ends = accumulate((weight.nbytes for weight in weights), initial=first.data_ptr())
    pairs = zip(weights, pairwise(ends), strict=True)
    follow = [weight.data_ptr() == begin and weight.is_contiguous() for weight, (begin, _) in pairs]
    if not all(follow) or len({weight.untyped_storage().data_ptr() for weight in weights}) > 1:
        return None
    return first.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))


def normed(norm: Norm | None, x: Tensor) -> Tensor:
    """An RMS norm over all of x (T, N), or over each head of it."""
    if norm is None:
        return x
    size = len(norm.weight)
    parts = x if x.shape[-1] == size else x.unflatten(-1, (-1, size))
    if norm.weight.dtype == x.dtype:  # one kernel
        return F.rms_norm(parts, (size,), norm.weight, norm.eps).reshape(x.shape)
    return F.rms_norm(parts.float(), (size,), norm.weight, norm.eps).to(x.dtype).reshape(x.shape)


def _added(layer: LayerSpec, x: Tensor, change: tuple[Linear, Tensor, Norm | None], in_place: bool) -> Tensor:
    """x + residual_scale * norm(linear(inputs)), in one kernel if it is nothing but a product."""
    linear, inputs, norm = change
    if linear.bias is None and norm is None and layer.residual_scale == 1.0:
        add = x.addmm_ if in_place else partial(torch.addmm, x)
        return add(inputs, linear.weight.t())
    return torch.add(x, normed(norm, F.linear(inputs, linear.weight, linear.bias)), alpha=layer.residual_scale)
