"""A drafter of the kind of EAGLE-3 as lists of jobs in machine code: one call computes the entries of a round's new
positions, and one more each draft.

The modules of such a drafter spend more time in Python than in their products.
"""

from typing import Any

import torch
from torch import Tensor, nn

from utils.decode.engine_forward import MAX_WIDTH, CompiledEntries
from utils.engine.compiled_decoder import Buffers, DecoderProgram, RotaryTables, product_of, products_of
from utils.engine.decoder_spec import DecoderSpec, DraftSpec, JoinedInput
from utils.engine.machine_code import WORKERS, floats
from utils.engine.stored_weights import embedded


class DraftProgram(DecoderProgram):
    """All layers for so many new entries, and the logits of the last one."""

    def __init__(self, spec: DraftSpec, products: "DrafterProducts", buffers: Buffers, count: int) -> None:
        size = spec.decoder.hidden_size
        self._draft, self._products = spec, products
        self.tokens, self._joined = floats(count, size), floats(count, 2 * size)
        self.logits = floats(1, products.head[0].width)
        super().__init__(spec.decoder, products.layers, buffers, batch=1, count=count)

    def _add_jobs(self) -> None:
        x, attending = self.states[0], iter(zip(self._spec.layers, self._products.layers, strict=True))
        for joined, mixture in zip(self._draft.inputs, self._products.mixtures, strict=True):
            residual, given = (x, x) if joined is None else (self._join(joined, x), self._joined)
            if mixture is None:
                layer, own = next(attending)
                self._add_layer(layer, own, self._norm(layer.input_norm, given, self._hidden), x=residual, after=x)
            else:
                self._product(mixture, given, self._change)
                self._add_change(None, residual, x, scale=1.0)
        last = x[-1:]
        if self._draft.norm_before_head:
            last = self._norm(self._spec.final_norm, last, self.normed[-1:])
        self._product(self._products.head, last, self.logits)

    def _join(self, joined: JoinedInput, x: Tensor) -> Tensor:
        """Put the norms of token and state side by side. Returns what the layer's change is added to."""
        size = self._spec.hidden_size
        self._norm(joined.token_norm, self.tokens, self._joined[:, :size])
        self._norm(joined.state_norm, x, self._joined[:, size:])
        return self._norm(joined.state_norm, x, self._hidden) if joined.normed_residual else x


class DrafterProducts:
    """The products of a drafter whose linear layers are compiled kernels."""

    def __init__(self, model: nn.Module, spec: DraftSpec) -> None:
        self.mixtures = [None if mixture is None else product_of(model, mixture) for mixture in spec.mixtures]
        self.layers = products_of(model, spec.decoder)
        self.head = product_of(model, spec.decoder.head)


class CompiledDrafter(CompiledEntries):
    """Adds entries to a drafter that describes itself by `draft_spec`, as its present conventions have it."""

    def __init__(self, model: Any) -> None:
        self._model: Any = model
        spec: DecoderSpec = model.draft_spec().decoder
        self._products = products = DrafterProducts(model, model.draft_spec())
        self._rotary = RotaryTables(spec)
        with torch.inference_mode(False):  # passes in other modes write them as well
            others = [products.head, *filter(None, products.mixtures)]
            self._buffers = Buffers(spec, products.layers, MAX_WIDTH, others=others)
        self._programs: dict[tuple[int, Any], DraftProgram] = {}

    def __call__(self, states: Tensor, tokens: Tensor, first: int, cache: Any) -> tuple[Tensor, Tensor]:
        """Add at most MAX_WIDTH entries."""
        count = len(tokens)
        with WORKERS.lock:  # programs share buffers
            program = self._program(count)
            program.states[0].copy_(states)
            program.tokens.copy_(embedded(tokens, self._model.embed_tokens.weight))
            program.follow(first, self._rotary, cache.layers)
            program.run()
            return program.states[-1][-1:].clone(), program.logits[:, : self._products.head[0].outputs].clone()

    def _program(self, count: int) -> DraftProgram:
        key = count, self._model.conventions
        if key not in self._programs:
            with torch.inference_mode(False):
                self._programs[key] = DraftProgram(self._model.draft_spec(), self._products, self._buffers, count)
        return self._programs[key]
