"""A forward pass of our own for decoders that a DecoderSpec describes, in place of transformers'.

It keeps the KV cache, attention, rotary tables and the final norm; `Segments` compute everything between one attention
and the next. transformers' forward spends as much time in Python as small models spend in their products.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad, rms_norm
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from utils.decode.engine_forward import in_prefill
from utils.decode.kv_cache import GrowingLayer, new_cache
from utils.engine.decoder_spec import DecoderSpec, LayerSpec, Segments
from utils.engine.row_attention import HeadShape, RowGroup, chosen_attention, prefill_groups, row_groups
from utils.engine.threads import torch_threads

TABLE_STEP = 64  # rotary tables hold a multiple of this number of positions


class RotaryTables:
    """cos and sin of every position so far, for each rotary table of a decoder."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._length = 0

    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(part.nbytes for table in self._tables for part in table)

    def rows(self, positions: slice, batch: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin (batch * T, rotary_dim) of each table, and an empty pair for layers without positions."""
        if positions.stop > self._length:
            self._length = max(2 * self._length, -(-positions.stop // TABLE_STEP) * TABLE_STEP)
            every = torch.arange(self._length)
            self._tables = [rope(every) for rope in self._spec.ropes]
        parts = [tuple(part[positions].repeat(batch, 1) for part in table) for table in self._tables]
        empty = torch.empty(batch * (positions.stop - positions.start), 0)
        return [*parts, (empty, empty)]  # type: ignore[list-item]  # pairs


class LeanDecoder:
    """The forward pass of one model; an `EngineForward`.

    original: transformers' forward, for arguments that are not supported here, such as an attention mask. None if its
    weights are gone.
    """

    def __init__(
        self, spec: DecoderSpec, segments: Segments, config: Any, *, original: Callable[..., Any] | None = None
    ) -> None:
        self._spec, self._segments, self._config, self._original = spec, segments, config, original
        self.unnormed: Tensor | None = None  # the input of the final norm, of the last pass that returned all states
        self.rotary = RotaryTables(spec)
        # Layers rarely differ in their scaling.
        scalings = {layer.scaling for layer in spec.layers}
        with torch_threads(segments.row_threads):
            self._attention = {scaling: chosen_attention(self._shape(scaling)) for scaling in scalings}

    @property
    def has_tested_attention(self) -> bool:
        """Whether attention was found to have equal bits at every width. One thread is the last resort, untested."""
        return all(how.threads is None for how in self._attention.values())

    def _shape(self, scaling: float) -> HeadShape:
        return HeadShape(self._spec.heads, self._spec.kv_heads, self._spec.head_dim, scaling)

    def __call__(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Any = None,  # transformers' generate passes only arguments that are named here
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """ids (B, T) -> logits (B, logits_to_keep or T, V), float32. Other arguments go to transformers' forward.

        A prefill has no logits: (B, 0, V).
        """
        others |= {"attention_mask": attention_mask, "position_ids": position_ids}
        unsupported = any(value is not None for value in others.values()) or torch.is_grad_enabled()
        unsupported |= return_dict is False or not isinstance(logits_to_keep, int)  # a tuple, chosen positions
        if input_ids is None or unsupported or not _is_growing(past_key_values):
            return self._transformers_forward(
                input_ids=input_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                output_hidden_states=output_hidden_states,
                return_dict=return_dict,
                **others,
            )
        cache = self.new_cache() if past_key_values is None else past_key_values
        with torch_threads(None if in_prefill() else self._segments.row_threads):
            compute = self._prefill if in_prefill() else self._layers
            states = compute(input_ids, cache, every=bool(output_hidden_states))
            logits = self._logits(states[-1], logits_to_keep)
            self.unnormed = states.pop(-2) if output_hidden_states else None
        return CausalLMOutputWithPast(
            logits=logits,
            past_key_values=cache if use_cache in (None, True) else None,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def new_cache(self) -> DynamicCache:
        """An empty cache that keeps all tokens: a sliding window is cut out of it."""
        return new_cache(self._config, keeps_all=True)

    def run_products(self) -> None:
        """Compute the products of one decode step alone, to compare its time with theirs."""
        with torch_threads(self._segments.row_threads):
            self._segments.run_products()

    def for_cut(self, cut: Any) -> "LeanDecoder":
        """The forward pass of the first layers, with the same segments."""
        depth = cut.config.get_text_config(decoder=True).num_hidden_layers
        spec = replace(self._spec, layers=self._spec.layers[:depth])
        original = self._original and cut.forward
        return LeanDecoder(spec, self._segments, cut.config, original=original)

    def _transformers_forward(self, **arguments: Any) -> Any:
        if self._original is None:
            raise NotImplementedError("this engine computes only cached or uncached passes over token ids")
        return self._original(**arguments)

    def _prefill(self, ids: Tensor, cache: Any, *, every: bool) -> list[Tensor]:
        """Like `_layers`, in chunks of as many rows as the segments compute without padding or copies of their own."""
        chunks = [self._chunk(part, cache, every=every) for part in ids.split(self._segments.prefill_rows[-1], dim=1)]
        return [torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)]

    def _chunk(self, ids: Tensor, cache: Any, *, every: bool) -> list[Tensor]:
        count = ids.shape[1]
        size = next(size for size in self._segments.prefill_rows if size >= count)
        states = self._layers(pad(ids, (0, size - count)), cache, every=every)
        cache.crop(count - size)  # forgets the added rows
        return [state[:, :count] for state in states]

    def _layers(self, ids: Tensor, cache: Any, *, every: bool) -> list[Tensor]:
        """The states (B, T, hidden): after the final norm, and all before it if `every`.

        A prefill without `every` only fills the cache: the last state is none of the model's.
        """
        spec, segments, prefill = self._spec, self._segments, in_prefill()
        batch, count = ids.shape
        past = cache.get_seq_length()
        tables = self.rotary.rows(slice(past, past + count), batch)
        ropes = [tables[-1 if layer.rope is None else layer.rope] for layer in spec.layers]
        groups = self._groups(past, count, prefill=prefill)
        x = embedding(ids, spec.embedding.weight).reshape(batch * count, -1).float()
        x = x if spec.embedding_scale == 1.0 else x * spec.embedding_scale
        states = [x.clone()] if every else []
        qkv: Tensor | None = segments.begin(x, cos=ropes[0][0], sin=ropes[0][1], prefill=prefill)
        for index, layer in enumerate(spec.layers):
            assert qkv is not None
            self._store(qkv, count, cache.layers[index])
            if prefill and not every and index + 1 == len(spec.layers):
                break  # nobody reads what the last layer returns
            attended = self._attend(qkv, layer, cache.layers[index], groups[layer.window])
            cos, sin = ropes[min(index + 1, len(ropes) - 1)]
            x, qkv = segments.advance(index, x, attended, cos=cos, sin=sin, prefill=prefill)
            if every:
                states.append(x.clone())
        states.append(rms_norm(x, (spec.hidden_size,), spec.final_norm.weight.float(), spec.final_norm.eps))
        return [state.view(batch, count, -1) for state in states]

    def _groups(self, past: int, count: int, *, prefill: bool) -> dict[int | None, list[RowGroup]]:
        build = prefill_groups if prefill else row_groups
        return {window: build(past, count, window) for window in {layer.window for layer in self._spec.layers}}

    def _store(self, qkv: Tensor, count: int, cached: GrowingLayer) -> None:
        """Store keys and values of the new rows, `count` of each sequence."""
        heads, ends = self._spec.heads, self._spec.heads + self._spec.kv_heads
        split = qkv.view(-1, count, *qkv.shape[1:])  # (B, T, heads + 2 * kv_heads, D)
        cached.update(split[:, :, heads:ends].transpose(1, 2), split[:, :, ends:].transpose(1, 2))

    def _attend(self, qkv: Tensor, layer: LayerSpec, cached: GrowingLayer, groups: Sequence[RowGroup]) -> Tensor:
        """Attend with the queries of the new rows, whose keys are stored. Returns (B * T, heads * head_dim)."""
        count, heads = groups[-1].last, self._spec.heads
        split = qkv.view(-1, count, *qkv.shape[1:])  # (B, T, heads + 2 * kv_heads, D)
        keys, values = cached.padded()
        how = self._attention[layer.scaling]
        rows = [
            how.attend(split[row, :, :heads], keys[row], values[row], groups, prefill=in_prefill())
            for row in range(len(split))
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _logits(self, x: Tensor, keep: int) -> Tensor:
        """Logits (B, keep, V) of x (B, T, hidden), after the final norm."""
        if in_prefill():
            return x.new_empty(len(x), 0, self._spec.vocabulary)
        spec, kept = self._spec, x[:, -keep:] if keep else x
        rows = kept.reshape(-1, spec.hidden_size)
        logits = self._segments.logits(rows).clone()
        if spec.logit_scale != 1.0:
            logits *= spec.logit_scale
        if spec.logit_softcap is not None:
            logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
        return logits.view(*kept.shape[:2], -1)


def _is_growing(cache: Any) -> bool:
    """Whether a cache is of `new_cache`, or None. transformers' generate brings one of its own."""
    return cache is None or (bool(cache.layers) and all(isinstance(layer, GrowingLayer) for layer in cache.layers))
