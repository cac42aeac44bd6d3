"""A KV cache that grows in place, so that a token costs the same however long the context is.

transformers' own layer concatenates: at 4,000 tokens every step copies all keys and values once more. Here they live
in a buffer with spare capacity, and the model sees a view of its beginning.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

MIN_SPARE = 256  # positions


class GrowingLayer(DynamicLayer):
    """Keys and values (B, heads, length, D) as views of larger buffers. Row selection and copying are inherited.

    memory: an object that stands for these buffers. Others, also those of a deep copy, have another one.
    """

    _layer_type = None  # keeps transformers from registering this class for all models
    memory: object = None
    _buffers: tuple[Tensor, ...] = ()
    _size = 0, 0, 0  # of the buffers: B, heads, capacity
    # Positions that `extended` has added, if the views do not have them yet. Views take time in every layer of every
    # pass, and machine code does not need them.
    _pending = 0
    _keys: Any
    _values: Any

    @property
    def keys(self) -> Any:
        self._cut_views()
        return self._keys

    @keys.setter
    def keys(self, value: Any) -> None:
        self._cut_views()
        self._keys = value

    @property
    def values(self) -> Any:
        self._cut_views()
        return self._values

    @values.setter
    def values(self, value: Any) -> None:
        self._cut_views()
        self._values = value

    def _cut_views(self) -> None:
        if self._pending:
            self._keys, self._values = (buffer[:, :, : self._pending] for buffer in self._buffers)
            self._pending = 0

    def get_seq_length(self) -> int:
        """The number of positions."""
        return self._pending or int(super().get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove positions at the end. tokens_to_remove: their number, negative."""
        if -self._pending < tokens_to_remove <= 0:
            self._pending += tokens_to_remove
        else:
            super().crop(tokens_to_remove)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new positions, and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Length of the views, not of the buffers: a crop shortens the views, and the next update overwrites the rest.
        length, new = self.get_seq_length(), (key_states, value_states)
        end = length + key_states.shape[-2]
        if not self._fits(length, end, key_states.dtype):
            # Capacity grows by half, so the copies cost constant time per position on average.
            self._reallocate(length, end + max(MIN_SPARE, end // 2), new)
        for buffer, part in zip(self._buffers, new, strict=True):
            buffer[..., length:end, :] = part
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values

    def extended(self, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
        """Append new positions (B, heads, count, D), float32, that the caller fills. Returns the buffers
        (B, heads, capacity, D).
        """
        length, (batch, heads, capacity) = self.get_seq_length(), self._size
        end = length + shape[2]
        has_room = shape[:2] == (batch, heads) and end <= capacity
        # Positions that `extended` has added are float32 in these buffers.
        if not has_room or not (self._pending or self._fits(length, end, torch.float32)):
            template = torch.empty(shape, dtype=torch.float32, device="cpu")
            if not self.is_initialized:
                self.lazy_initialization(template, template)
            self._reallocate(length, end + max(MIN_SPARE, end // 2), (template, template))
        self._pending = end
        return self._buffers[0], self._buffers[1]

    def _fits(self, length: int, end: int, dtype: torch.dtype) -> bool:
        """Whether the keys lie in the buffers (selected rows are separate tensors), and `end` positions of this dtype
        fit. Passes of an engine and of transformers may take turns.
        """
        if not self._buffers or end > self._buffers[0].shape[-2] or self._buffers[0].dtype != dtype:
            return False
        return length == 0 or self.keys.data_ptr() == self._buffers[0].data_ptr()

    def _reallocate(self, length: int, capacity: int, new: tuple[Tensor, Tensor]) -> None:
        """Copy into buffers of this capacity, with the other dimensions of the new states."""
        buffers = tuple(part.new_empty((*part.shape[:-2], capacity, part.shape[-1])) for part in new)
        if length:
            for buffer, part in zip(buffers, (self.keys, self.values), strict=True):
                buffer[..., :length, :] = part
        self._buffers, self.memory = buffers, object()
        self._size = buffers[0].shape[0], buffers[0].shape[1], capacity

    def reset(self) -> None:
        """Forget everything, including the buffers."""
        self._buffers, self._pending = (), 0
        super().reset()


def new_cache(config: Any, *, keeps_all: bool = False) -> DynamicCache:
    """An empty cache for a model. Full attention layers grow in place; other layer types are those of transformers.

    keeps_all: sliding layers do not drop the tokens outside their window.
    """
    cache = DynamicCache(config=config)
    # The exact type: sliding-window layers are a subclass with an `update` of their own.
    replaced = (DynamicLayer, DynamicSlidingWindowLayer) if keeps_all else (DynamicLayer,)
    cache.layers = [GrowingLayer() if type(layer) in replaced else layer for layer in cache.layers]
    # A cache made without layers creates them from this class on first use.
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    return cache
