"""A drafter of the kind of EAGLE-3 in recorded passes: one graph for each number of new entries.

Its modules launch about 40 kernels for a draft from Python, which takes longer than a recorded pass of the target.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from utils.decode.engine_forward import CompiledEntries
from utils.engine.decoder_spec import JoinedInput, Linear
from utils.engine.graph_cache import GraphCache, Graphs, Recording, Replays, Slot, SlotPool
from utils.engine.graph_decoder import BACKENDS, SlotDecoder, normed

MOST = 9  # new entries of a recorded pass: those after a round of 8 accepted drafts


class SlotDrafter(SlotDecoder):
    """The pass over new entries of a drafter that describes itself by `draft_spec`."""

    def __init__(self, model: Any) -> None:
        self._model, draft = model, model.draft_spec()
        super().__init__(draft.decoder.with_linears(partial(_weighted, model)))
        self._mixtures = [None if mixture is None else _weighted(model, mixture) for mixture in draft.mixtures]

    def entries(self, slot: Slot, states: Tensor, tokens: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return the pass that adds entries at slot.position: from the states (T, H) before them and the tokens (T,)
        that follow these, to the last state (1, H) and its logits (1, V') over the draft vocabulary.
        """
        (columns, tables), draft = self._tables_of(slot.capacity), self._model.draft_spec()
        inputs = [joined and self._of_joined(joined) for joined in draft.inputs]

        def run() -> tuple[Tensor, Tensor]:
            with sdpa_kernel(BACKENDS):
                shared = self._shared(slot.position + columns[: len(tokens)], columns, tables)
                embedded = F.embedding(tokens, self._spec.embedding).to(states.dtype)
                x, attending = states, iter(zip(self._layers, slot.pairs, strict=True))
                for joined, mixture in zip(inputs, self._mixtures, strict=True):
                    residual, given = (x, x) if joined is None else _joined_input(joined, embedded, x)
                    if mixture is None:
                        layer, pair = next(attending)
                        given = normed(layer.spec.input_norm, given)
                        x = self._attended(layer, residual, pair, shared, given=given, in_place=False)
                        x = self._with_mlp(layer, x)
                    else:
                        x = residual + F.linear(given, mixture.weight, mixture.bias)
                last = x[-1:]
                read = normed(self._final_norm, last) if draft.norm_before_head else last
                return last, F.linear(read, self._spec.head.weight, self._spec.head.bias)

        return run

    def _of_joined(self, joined: JoinedInput) -> JoinedInput:
        norms = (self._converted(joined.token_norm), self._converted(joined.state_norm))
        return JoinedInput(*norms, joined.normed_residual)


class GraphDrafter(Replays, CompiledEntries):
    """Adds entries to a drafter by replays, as its present conventions have it. record: a CudaRecorder or its like."""

    def __init__(self, model: Any, record: Any) -> None:
        super().__init__(record)
        self._model = model
        self._decoder = SlotDrafter(model)
        self._layers = len(model.draft_spec().decoder.layers)
        self._pool = SlotPool(model.device, self._decoder.prepare)
        self._fusions: Graphs = {}
        self._fused: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None  # one row, and how it was fused

    def new_cache(self) -> GraphCache:
        return GraphCache(self._pool, self._layers)

    def __call__(self, states: Tensor, tokens: Tensor, first: int, cache: Any) -> tuple[Tensor, Tensor]:
        slot = cache.reserve(len(tokens))
        slot.position.fill_(first)
        if len(tokens) <= MOST:
            # Copies, because the next replay overwrites the outputs.
            state, logits = map(torch.clone, self._replayed(*self._entries(slot, states, tokens)))
        else:
            state, logits = self._decoder.entries(slot, states, tokens)()
        cache.advance(len(tokens))
        return state, logits

    def fused(self, features: Tensor, fuse: Callable[[Tensor], Tensor]) -> Tensor:
        if len(features) > MOST:
            return fuse(features)
        if self._fused is None:
            self._fused = features[:1].clone(), fuse
        return self._replayed(*self._fusion(features, fuse))[0].clone()

    def prepare(self, first: int, last: int) -> None:
        size, weight = self._decoder.hidden_size, self._model.embed_tokens.weight
        for count in range(1, MOST + 1):
            states = torch.zeros(count, size, dtype=self._model.dtype, device=weight.device)
            tokens = torch.zeros(count, dtype=torch.long, device=weight.device)
            for slot in self._pool.between(first, last + MOST):
                slot.position.zero_()
                self._graph(*self._entries(slot, states, tokens))
            if self._fused is not None:
                row, fuse = self._fused
                self._graph(*self._fusion(row.expand(count, -1), fuse))

    def _entries(self, slot: Slot, states: Tensor, tokens: Tensor) -> Recording:
        key = len(tokens), self._model.conventions
        return slot.graphs, key, (states, tokens), partial(self._decoder.entries, slot)

    def _fusion(self, features: Tensor, fuse: Callable[[Tensor], Tensor]) -> Recording:
        return self._fusions, (len(features),), (features,), lambda own: lambda: (fuse(own),)


def _joined_input(joined: JoinedInput, embedded: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer's change is added to, and what the layer reads."""
    state = normed(joined.state_norm, x)
    read = torch.cat([normed(joined.token_norm, embedded), state], dim=-1)
    return (state if joined.normed_residual else x), read


def _weighted(model: nn.Module, linear: Linear) -> Linear:
    module: Any = model.get_submodule(linear.name)
    return Linear(linear.name, module.weight, module.bias)
