"""Features: hidden states of a target that drafters read, and their numbers.

As in transformers, 0 is the embeddings, i the output of layer i - 1 (layers counted from 0), and n, or -1, the output
of the last of n layers after the final norm. n + 1 is that output before the final norm, which transformers does not
return.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from utils.decode.engine_forward import engine_forward, only_states
from utils.errors import UserError

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")  # names in transformers' decoders


def layer_count(model: Any) -> int:
    """The number of decoder layers."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


class FeatureReader:
    """Reads features off the forward passes of one model. Raises UserError for a number that it does not have."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        count = layer_count(model)
        unknown = next((layer for layer in layers if not -count - 1 <= layer <= count + 1), None)
        if unknown is not None:
            raise UserError(f"The target has {count} layers: {unknown} is not one of its hidden states.")
        self._model, self._count, self._layers = model, count, tuple(layers)
        self._read = frozenset(layer % (count + 1) if layer <= count else layer for layer in layers)
        self._norm = final_norm(model) if count + 1 in layers else None
        self._unnormed: Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the input of the final norm while the model runs in this block."""
        self._unnormed = None
        # Passes that transformers computes run the norm, and those of an engine return its input themselves.
        with only_states(self._read), self._norm.register_forward_pre_hook(self._keep) if self._norm else nullcontext():
            yield

    def _keep(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._unnormed = inputs[0]

    def features(self, output: Any) -> Tensor:
        """The features (B, T, F) of a forward pass that returned its hidden states."""
        return torch.cat([self._state(output, layer) for layer in self._layers], dim=-1)

    def _state(self, output: Any, layer: int) -> Tensor:
        if layer <= self._count:
            state: Tensor = output.hidden_states[layer]
            return state
        own: Tensor | None = getattr(engine_forward(self._model), "unnormed", None)
        if own is not None:
            return own
        if self._unnormed is None:
            raise UserError("This engine does not return hidden states before the final norm: use /engine plain.")
        return self._unnormed.view(output.hidden_states[-1].shape)


def final_norm(model: Any) -> nn.Module:
    """The norm between the last layer and the output head. Raises UserError if it is not found."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name in FINAL_NORMS:
        if isinstance(found := getattr(decoder, name, None), nn.Module):
            return found
    raise UserError("The target's final norm was not found, so its input cannot be read: use a different --drafter.")
