"""A forward pass of our own for decoders that a DecoderSpec describes, in place of transformers'.

It keeps the KV cache and rotary tables; a `DecoderProgram` computes the layers. transformers' forward spends as much
time in Python as small models spend in their products.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from utils.decode.engine_forward import PREFILL_CHUNK, EngineForward, in_prefill, is_plain_call, read_features
from utils.decode.kv_cache import GrowingLayer, new_cache
from utils.engine.compiled_decoder import Buffers, DecoderProgram, LayerProducts, RotaryTables
from utils.engine.compiled_products import CompiledKernel
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.machine_code import WORKERS
from utils.engine.stored_weights import embedded

PROGRAMS = 128  # the most that are kept: for all common widths, with and without states, and for some prompts


class LeanDecoder(EngineForward):
    """The forward pass of one model.

    products: of each layer. head: of the logits. Calls with other arguments than those of sessions, such as an
    attention mask, go to the forward pass that the model had.
    """

    def __init__(
        self, spec: DecoderSpec, products: Sequence[LayerProducts], head: CompiledKernel, model: PreTrainedModel
    ) -> None:
        self._spec, self._products, self._head = spec, list(products), head
        self._config, self._original = model.config, model.forward
        self.__signature__ = inspect.signature(model.forward)  # sessions look for arguments that the model takes
        self.features: Tensor | None = None
        self.rotary = RotaryTables(spec)
        self._buffers: Buffers | None = None
        self._programs: dict[tuple[int, int, frozenset[int]], DecoderProgram] = {}

    def __call__(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """ids (B, T) -> logits (B, logits_to_keep or T, V), float32. A prefill has no logits: (B, 0, V)."""
        cache = kwargs.get("past_key_values")
        self.features = None
        if input_ids is None or not is_plain_call(kwargs) or not self._takes(cache):
            return self._original(input_ids=input_ids, **kwargs)
        cache = self.new_cache() if cache is None else cache
        hidden, every, dtype = None, range(len(self._spec.layers) + 1), self._spec.embedding.dtype
        layers = (read_features() or every) if kwargs.get("output_hidden_states") else ()
        with WORKERS.lock:  # programs share buffers
            normed, states = self._states(input_ids, cache, layers)
            # Both in the format of the drafters.
            if layers == every:
                hidden = tuple(state.to(dtype, copy=True) for state in states)
            elif layers:
                self.features = torch.cat(states, dim=-1).to(dtype)
        return CausalLMOutputWithPast(
            logits=self._logits(normed, kwargs.get("logits_to_keep", 0)),
            past_key_values=cache if kwargs.get("use_cache") in (None, True) else None,
            hidden_states=hidden,
        )

    def new_cache(self) -> DynamicCache:
        """An empty cache that keeps all tokens: a sliding window is cut out of it."""
        return new_cache(self._config, keeps_all=True)

    def for_cut(self, cut: Any) -> "LeanDecoder":
        """The forward pass of the first layers, with the same products."""
        depth = cut.config.get_text_config(decoder=True).num_hidden_layers
        spec = replace(self._spec, layers=self._spec.layers[:depth])
        return LeanDecoder(spec, self._products[:depth], self._head, cut)

    def narrow(self, outputs: int) -> None:
        """Compute only the first outputs of the head."""
        self._head = self._head.first(outputs)

    def _takes(self, cache: Any) -> bool:
        """Whether a cache is of `new_cache`, or None. transformers' generate brings one of its own."""
        if cache is None:
            return True
        layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer)]
        return len(cache.layers) == len(layers) >= max(1, len(self._spec.layers))

    def _states(self, ids: Tensor, cache: Any, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """The output of the final norm (B, T, hidden), and the hidden states of these layers, which the next pass
        overwrites.

        A prefill in which the last layer's is not among them only fills the cache: then the output is none of the
        model's.
        """
        spec, (batch, count), depth = self._spec, ids.shape, len(self._spec.layers)
        # Numbered as for `feature_pass`: `depth` is the output of the final norm, and depth + 1 its input.
        kept = {layer: min(layer, depth) for layer in layers if layer != depth}
        program, past = self._program(batch, count, frozenset(kept.values())), cache.get_seq_length()
        x = embedded(ids, spec.embedding).reshape(batch * count, -1).float()
        torch.mul(x, spec.embedding_scale, out=program.states[0])
        program.follow(past, self.rotary, cache.layers)
        program.run(fills=in_prefill() and max(layers, default=0) < depth)
        normed = program.normed.clone().view(batch, count, -1)
        return normed, [program.states[kept[n]].view(batch, count, -1) if n in kept else normed for n in layers]

    def _program(self, batch: int, count: int, kept: frozenset[int] = frozenset()) -> DecoderProgram:
        """A program for these rows that keeps these states."""
        key, rows, buffers = (batch, count, kept), batch * count, self._buffers
        program = self._programs.pop(key, None)
        if program is None:
            if buffers is None or rows > buffers.rows or len(kept) > buffers.kept:
                self._programs = {}
                rows, states = max(rows, PREFILL_CHUNK), max(len(kept), 0 if buffers is None else buffers.kept)
                buffers = self._buffers = None  # freed before the next ones are made
                with torch.inference_mode(False):  # passes in other modes write them as well
                    buffers = self._buffers = Buffers(self._spec, self._products, rows, kept=states)
            program = DecoderProgram(self._spec, self._products, buffers, batch=batch, count=count, kept=kept)
        self._programs[key] = program  # at the end, so that the first one was not used for the longest time
        if len(self._programs) > PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program

    def _logits(self, x: Tensor, keep: int) -> Tensor:
        """Logits (B, keep, V) of x (B, T, hidden), after the final norm."""
        if in_prefill():
            return x.new_empty(len(x), 0, self._spec.vocabulary)
        spec, kept = self._spec, x[:, -keep:] if keep else x
        return spec.scaled(self._head(kept.reshape(-1, spec.hidden_size))).view(*kept.shape[:2], -1)
