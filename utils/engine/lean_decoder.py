"""A forward pass of our own for decoders that a DecoderSpec describes, in place of transformers'.

It keeps the KV cache and rotary tables; a `DecoderProgram` computes the layers. transformers' forward spends as much
time in Python as small models spend in their products.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from utils.decode.engine_forward import PREFILL_CHUNK, in_prefill, is_read
from utils.decode.kv_cache import GrowingLayer, new_cache
from utils.engine.compiled_decoder import Buffers, DecoderProgram, LayerProducts, Product
from utils.engine.decoder_spec import DecoderSpec
from utils.engine.machine_code import WORKERS

TABLE_STEP = 64  # rotary tables hold a multiple of this number of positions
PROGRAMS = 128  # the most that are kept: for all common widths, with and without states, and for some prompts


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
        """cos and sin (batch * T, rotary_dim) of each table."""
        if positions.stop > self._length:
            self._length = max(2 * self._length, -(-positions.stop // TABLE_STEP) * TABLE_STEP)
            every = torch.arange(self._length)
            self._tables = [rope(every) for rope in self._spec.ropes]
        if batch == 1:
            return [(cos[positions], sin[positions]) for cos, sin in self._tables]
        return [(cos[positions].repeat(batch, 1), sin[positions].repeat(batch, 1)) for cos, sin in self._tables]


class LeanDecoder:
    """The forward pass of one model; an `EngineForward`.

    products: of each layer. head: of the logits. original: transformers' forward, for arguments that are not supported
    here, such as an attention mask. None if its weights are gone.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        products: Sequence[LayerProducts],
        head: Product,
        *,
        config: Any,
        original: Callable[..., Any] | None = None,
    ) -> None:
        self._spec, self._products, self._head = spec, list(products), head
        self._config, self._original = config, original
        self.unnormed: Tensor | None = None  # the input of the final norm, of the last pass that returned all states
        self.rotary = RotaryTables(spec)
        self._buffers: Buffers | None = None
        self._programs: dict[tuple[int, int, bool], DecoderProgram] = {}

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
        if input_ids is None or unsupported or not self._takes(past_key_values):
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
        with WORKERS.lock:  # programs share buffers
            states = self._layers(input_ids, cache, every=bool(output_hidden_states))
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
        for layer in self._products:
            for product in (layer.qkv, layer.output, layer.gate_up, layer.down):
                product(torch.zeros(1, product.inputs))
        self._head(torch.zeros(1, self._head.inputs))

    def for_cut(self, cut: Any) -> "LeanDecoder":
        """The forward pass of the first layers, with the same products."""
        depth = cut.config.get_text_config(decoder=True).num_hidden_layers
        spec = replace(self._spec, layers=self._spec.layers[:depth])
        original = self._original and cut.forward
        return LeanDecoder(spec, self._products[:depth], self._head, config=cut.config, original=original)

    def _takes(self, cache: Any) -> bool:
        """Whether a cache is of `new_cache`, or None. transformers' generate brings one of its own."""
        if cache is None:
            return True
        layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer)]
        return len(cache.layers) == len(layers) >= max(1, len(self._spec.layers))

    def prepare(self, first: int, last: int) -> None:
        """Nothing: programs depend on no position, and take milliseconds to build."""

    def _transformers_forward(self, **arguments: Any) -> Any:
        if self._original is None:
            raise NotImplementedError("this engine computes only cached or uncached passes over token ids")
        self.unnormed = None
        return self._original(**arguments)

    def _layers(self, ids: Tensor, cache: Any, *, every: bool) -> list[Tensor]:
        """The states (B, T, hidden): after the final norm, and all before it if `every`, empty if they are not read.

        A prefill without `every` only fills the cache: the last state is none of the model's.
        """
        spec, (batch, count) = self._spec, ids.shape
        program, past = self._program(batch, count, keeps=every), cache.get_seq_length()
        x = embedding(ids, spec.embedding.weight).reshape(batch * count, -1).float()
        torch.mul(x, spec.embedding_scale, out=program.states[0])
        for buffer, table in zip(program.tables, self.rotary.rows(slice(past, past + count), batch), strict=True):
            for own, part in zip(buffer, table, strict=True):
                own.copy_(part)
        heads = (batch, spec.kv_heads, count, spec.head_dim)
        for index, layer in enumerate(cache.layers[: len(spec.layers)]):
            keys, values = layer.extended(heads)
            program.bind(index, keys, values, past)
        program.run(fills=in_prefill() and not every)
        # Numbered as in transformers, which does not have the last one, the input of the final norm.
        numbers = [*range(len(spec.layers)), len(spec.layers) + 1] if every else []
        read = [(state, is_read(number)) for number, state in zip(numbers, program.states, strict=False)]
        states = [state.clone().view(batch, count, -1) if wanted else state[:0] for state, wanted in read]
        return [*states, program.normed.clone().view(batch, count, -1)]

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
        rows = kept.reshape(-1, spec.hidden_size)
        logits = self._head(rows)
        if spec.logit_scale != 1.0:
            logits *= spec.logit_scale
        if spec.logit_softcap is not None:
            logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
        return logits.view(*kept.shape[:2], -1)
