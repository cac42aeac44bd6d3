"""Recorded passes, and their KV caches: buffers of fixed addresses, and views of them for eager passes.

A graph repeats the same operations on the same addresses, so buffers and graphs form a slot, which outlives the cache
of a run.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from utils.decode.kv_cache import GrowingLayer

SMALLEST = 512  # positions of a slot; longer ones have twice as many each time
SPARE_SLOTS = 2  # kept of each capacity; a self-test needs more at a time than a run
Outputs = tuple[Tensor, ...]
Graphs = dict[tuple[Any, ...], tuple[Outputs, Any]]  # inputs and graph by what was recorded
# Where a graph is or will be, its key, which begins with a number of rows, its inputs of up to so many rows, and what
# makes the pass over tensors like these.
Recording = tuple[Graphs, tuple[Any, ...], Outputs, Callable[..., Callable[[], Outputs]]]


class Slot:
    """The buffers of one sequence, and the graphs that were recorded on them."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.position = torch.zeros((), dtype=torch.long, device=device)  # at which a graph writes its first row
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: (1, heads, capacity, D)
        self.pairs: list[Tensor] = []  # (2, heads, capacity, D) of each layer, of which the buffers are views
        self.graphs: Graphs = {}

    def room(self, layer: int, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer for states (1, heads, T, D)."""
        if layer not in self.buffers:
            # Zeros, because a NaN in a masked position would still make the attention of a row NaN.
            shapes = [(*part.shape[:-2], self.capacity, part.shape[-1]) for part in new]
            self.buffers[layer] = (new[0].new_zeros(shapes[0]), new[1].new_zeros(shapes[1]))
        return self.buffers[layer]

    def join(self, layers: int, heads: int, like: Tensor) -> None:
        """Make the buffers of all layers, keys and values of each in one tensor. like: a head's values (D,)."""
        self.pairs = [like.new_zeros((2, heads, self.capacity, len(like))) for _ in range(layers)]
        self.buffers = {layer: (both[:1], both[1:]) for layer, both in enumerate(self.pairs)}


class SlotPool:
    """The slots of a model that no cache uses at the moment. complete: makes what a new one needs."""

    def __init__(self, device: torch.device, complete: Callable[[Slot], None] = lambda slot: None) -> None:
        self._device, self._complete, self._smallest = device, complete, SMALLEST
        self._spare: dict[int, list[Slot]] = {}

    def capacity(self, length: int) -> int:
        """Return the capacity of the slot that `take` returns."""
        return self._smallest << (max(0, length - 1) // self._smallest).bit_length()

    def take(self, length: int) -> Slot:
        """Return a slot with room for `length` positions."""
        capacity = self.capacity(length)
        if spare := self._spare.get(capacity):
            return spare.pop()
        with torch.inference_mode(False):  # passes in other modes write them as well
            slot = Slot(capacity, self._device)
            self._complete(slot)
        return slot

    def between(self, first: int, last: int) -> Iterator[Slot]:
        """The slots that runs take whose positions lie between these."""
        capacity = self.capacity(first)
        while capacity <= self.capacity(last):
            slot = self.take(capacity)
            yield slot
            self.give(slot)
            capacity *= 2

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        spare = self._spare.setdefault(slot.capacity, [])
        if len(spare) < SPARE_SLOTS:
            spare.append(slot)

    @contextmanager
    def lengthened(self, factor: int) -> Iterator[None]:
        """Begin with slots of `factor` times the smallest length, a power of two, to compare them."""
        self._smallest = factor * SMALLEST
        try:
            yield
        finally:
            self._smallest = SMALLEST


class Replays:
    """Records a pass when it is first needed, and replays it from then on. record: a CudaRecorder or its like."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def _replayed(self, *recording: Any) -> Outputs:
        """The outputs of a Recording, which the next replay overwrites."""
        own, graph = self._graph(*recording)
        for each, new in zip(own, recording[2], strict=True):
            each[: len(new)] = new
        graph.replay()
        outputs: Outputs = graph.outputs
        return outputs

    @torch.inference_mode(False)  # passes in other modes write the inputs as well
    @torch.no_grad()
    def _graph(self, graphs: Graphs, key: Any, inputs: Outputs, make: Any) -> tuple[Outputs, Any]:
        """The graph of a Recording and its own inputs."""
        if key not in graphs:
            own = tuple(each.new_zeros((key[0], *each.shape[1:])) for each in inputs)
            graphs[key] = own, self._record(make(*own))
        return graphs[key]


class SlotLayer(DynamicLayer):
    """Keys and values (1, heads, length, D) in a slot. Views of its buffers are made only when they are read: a replay
    and a rewind just change the length.
    """

    _layer_type = None

    def __init__(self, slot: Slot, index: int) -> None:
        self.slot, self._index, self._length, self.is_initialized = slot, index, 0, False

    def _part(self, part: int) -> Tensor | None:
        buffers = self.slot.buffers.get(self._index)
        return None if buffers is None else buffers[part][..., : self._length, :]

    keys: Any = property(lambda self: self._part(0))
    values: Any = property(lambda self: self._part(1))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new positions, and return all keys and values."""
        end, new = self._length + key_states.shape[-2], (key_states, value_states)
        for buffer, part in zip(self.slot.room(self._index, new), new, strict=True):
            buffer[..., self._length : end, :] = part
        self.extend_to(end)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last positions; their number is negative."""
        self._length = max(0, self._length - abs(tokens_to_remove))

    def extend_to(self, length: int) -> None:
        """Set the length, after positions were written to the slot."""
        self._length, self.is_initialized = length, True

    def move(self, slot: Slot, keys: Tensor | None, values: Tensor | None) -> None:
        """Continue in another slot with these keys and values, if there are any."""
        self.slot, self._length = slot, 0
        if keys is not None and values is not None and keys.numel():
            self.update(keys, values)


class GraphCache(Cache):
    """The cache of one run. Forward passes outside a graph see views of `length` positions, as in a growing cache.

    Keys and values leave the slot for tensors of their own where there are several rows, such as those of a beam.
    """

    def __init__(self, pool: SlotPool, layers: int) -> None:
        self._pool, self.slot = pool, pool.take(1)
        super().__init__(layers=[SlotLayer(self.slot, index) for index in range(layers)])

    def __del__(self) -> None:
        self._pool.give(self.slot)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new positions to a layer. Before the first one, all move to a longer slot if they need one."""
        if layer_idx == 0 and len(key_states) > 1:
            self._leave()
        elif layer_idx == 0:
            self.reserve(key_states.shape[-2])
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, which may be more or fewer than before."""
        self._leave()
        super().reorder_cache(beam_idx)

    def _leave(self) -> None:
        for index, layer in enumerate(self.layers if self._in_slot() else ()):
            self.layers[index] = own = GrowingLayer()
            if layer.get_seq_length():
                own.update(layer.keys, layer.values)

    def _in_slot(self) -> bool:
        return isinstance(self.layers[0], SlotLayer)

    def reserve(self, count: int) -> Slot | None:
        """Return the slot with room for `count` more positions, or None if keys have left it."""
        if not self._in_slot():
            return None
        needed, old = self.get_seq_length() + count, self.slot
        if needed > old.capacity:
            self.slot = self._pool.take(needed)
            for layer in self.layers:
                layer.move(self.slot, layer.keys, layer.values)
            self._pool.give(old)
        return self.slot

    def advance(self, count: int) -> None:
        """Add `count` positions that a graph has written."""
        length = self.get_seq_length() + count
        for layer in self.layers:
            layer.extend_to(length)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphCache":
        twin = GraphCache(self._pool, len(self.layers))
        if not self._in_slot():
            twin.layers = copy.deepcopy(self.layers, memo)
            return twin
        twin.reserve(self.get_seq_length())
        for own, layer in zip(self.layers, twin.layers, strict=True):
            layer.move(twin.slot, own.keys, own.values)
        return twin


class RecordedLayer(DynamicLayer):
    """A layer as a graph sees it: whole buffers, and positions that only the device knows."""

    _layer_type = None
    is_compileable = True  # so that transformers masks the positions that are not filled

    def __init__(self, slot: Slot, index: int) -> None:
        super().__init__()
        self._slot, self._index, self.is_initialized = slot, index, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new positions, and return the buffers."""
        keys, values = self._slot.buffers[self._index]
        positions = self._slot.position + torch.arange(key_states.shape[-2], device=keys.device)
        keys.index_copy_(2, positions, key_states)
        values.index_copy_(2, positions, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the keys that attention sees, and the position of the first one."""
        return self._slot.capacity, 0

    def get_seq_length(self) -> Any:
        """Return the number of earlier positions as a tensor, since a graph must not fix it."""
        return self._slot.position


def recorded_cache(slot: Slot) -> Cache:
    """The cache with which a graph is recorded on a slot."""
    return Cache(layers=[RecordedLayer(slot, index) for index in sorted(slot.buffers)])
