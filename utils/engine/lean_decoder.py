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

from utils.decode.engine_forward import PREFILL_CHUNK, EngineForward, in_prefill, is_plain_call, is_read
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
        self.unnormed: Tensor | None = None  # the input of the final norm, of the last pass that returned all states
        self.rotary = RotaryTables(spec)
        self._buffers: Buffers | None = None
        self._programs: dict[tuple[int, int, bool], DecoderProgram] = {}

    def __call__(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """ids (B, T) -> logits (B, logits_to_keep or T, V), float32. A prefill has no logits: (B, 0, V)."""
        cache = kwargs.get("past_key_values")
        if input_ids is None or not is_plain_call(kwargs) or not self._takes(cache):
            self.unnormed = None
            return self._original(input_ids=input_ids, **kwargs)
        every = bool(kwargs.get("output_hidden_states"))
        cache = self.new_cache() if cache is None else cache
        with WORKERS.lock:  # programs share buffers
            states = self._layers(input_ids, cache, every=every)
        logits = self._logits(states[-1], kwargs.get("logits_to_keep", 0))
        if every and (dtype := self._spec.embedding.dtype) != torch.float32:  # in the format of the drafters
            states = [state.to(dtype) for state in states]
        self.unnormed = states.pop(-2) if every else None
        return CausalLMOutputWithPast(
            logits=logits,
            past_key_values=cache if kwargs.get("use_cache") in (None, True) else None,
            hidden_states=tuple(states) if every else None,
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

    def _layers(self, ids: Tensor, cache: Any, *, every: bool) -> list[Tensor]:
        """The states (B, T, hidden): after the final norm, and all before it if `every`, empty if they are not read.

        A prefill without `every` only fills the cache: the last state is none of the model's.
        """
        spec, (batch, count) = self._spec, ids.shape
        program, past = self._program(batch, count, keeps=every), cache.get_seq_length()
        x = embedded(ids, spec.embedding).reshape(batch * count, -1).float()
        torch.mul(x, spec.embedding_scale, out=program.states[0])
        program.follow(past, self.rotary, cache.layers)
        program.run(fills=in_prefill() and not every)
        # Numbered as in transformers, which does not have the last one, the input of the final norm.
        numbers = [*range(len(spec.layers)), len(spec.layers) + 1] if every else []
        nothing, kept = program.normed[:0], (batch, count, -1)
        states = [
            program.states[index].clone().view(kept) if is_read(number) else nothing
            for index, number in enumerate(numbers)
        ]
        return [*states, program.normed.clone().view(kept)]

    def _program(self, batch: int, count: int, *, keeps: bool) -> DecoderProgram:
        """A program for these rows."""
        key, rows, buffers = (batch, count, keeps), batch * count, self._buffers
        program = self._programs.pop(key, None)
        if program is None:
            if buffers is None or rows > buffers.rows or keeps > buffers.keeps:
                self._programs = {}
                rows, keeps_all = max(rows, PREFILL_CHUNK), keeps or (buffers is not None and buffers.keeps)
                buffers = self._buffers = None  # freed before the next ones are made
                with torch.inference_mode(False):  # passes in other modes write them as well
                    buffers = self._buffers = Buffers(self._spec, self._products, rows, keeps=keeps_all)
            program = DecoderProgram(self._spec, self._products, buffers, batch=batch, count=count, keeps=keeps)
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
