"""A KV cache that grows in place, so that a token costs the same however long the context is.

transformers' own layer concatenates: at 4,000 tokens every step copies all keys and values once more. Here they live in a buffer with
room to spare, and what the model sees is a view of its beginning.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LEAST_ROOM = 256  # positions


class GrowingLayer(DynamicLayer):
    """Keys and values (B, heads, length, D) as views of larger buffers. Cropping, selecting rows and copying are DynamicLayer's own."""

    _layer_type = None  # not to be registered as everybody's layer
    keys: Any
    values: Any
    _buffers: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new positions; all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length, new = self.get_seq_length(), (key_states, value_states)
        end = length + key_states.shape[-2]
        if not self._has_room(length, end):
            self._move(length, end + max(LEAST_ROOM, end // 2), new)
        for buffer, part in zip(self._buffers, new, strict=True):
            buffer[..., length:end, :] = part
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values

    def _has_room(self, length: int, end: int) -> bool:
        """Whether what is held lies in the buffers (selected rows are a tensor of their own) and as much as `end` fits there."""
        if not self._buffers or end > self._buffers[0].shape[-2]:
            return False
        return length == 0 or self.keys.data_ptr() == self._buffers[0].data_ptr()

    def _move(self, length: int, room: int, new: tuple[Tensor, Tensor]) -> None:
        """Into buffers with so much room, shaped otherwise as what is new."""
        buffers = tuple(part.new_empty((*part.shape[:-2], room, part.shape[-1])) for part in new)
        if length:
            for buffer, part in zip(buffers, (self.keys, self.values), strict=True):
                buffer[..., :length, :] = part
        self._buffers = buffers

    def reset(self) -> None:
        """Forget everything, the buffers too."""
        self._buffers = ()
        super().reset()


def growing_cache(config: Any) -> DynamicCache:
    """An empty cache for a model: full attention grows in place; layers of other kinds are transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    return cache
