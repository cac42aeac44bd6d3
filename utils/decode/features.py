"""Features: hidden states of a target that drafters read, and their numbers.

As in transformers, 0 is the embeddings, i the output of layer i - 1 (layers counted from 0), and n, or -1, the output
of the last of n layers after the final norm. n + 1 is that output before the final norm, which transformers does not
return.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from utils.decode.engine_forward import engine_forward, feature_pass
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
        self._model, self._count = model, count
        self._numbers = tuple(layer % (count + 1) if layer <= count else layer for layer in layers)
        self._norm = final_norm(model) if count + 1 in layers else None
        self._unnormed: Tensor | None = None

    def watching(self) -> AbstractContextManager[None]:
        """Mark the passes in this block, and keep the input of the final norm if it is read."""
        self._unnormed = None
        return feature_pass(self._numbers) if self._norm is None else self._watching_norm(self._norm)

    @contextmanager
    def _watching_norm(self, norm: nn.Module) -> Iterator[None]:
        # Only passes that transformers computes run the norm.
        with feature_pass(self._numbers), norm.register_forward_pre_hook(self._keep):
            yield

    def _keep(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._unnormed = inputs[0]

    def features(self, output: Any) -> Tensor:
        """The features (B, T, F) of a forward pass that was watched and returned its hidden states."""
        own: Tensor | None = getattr(engine_forward(self._model), "features", None)
        return torch.cat([self._state(output, layer) for layer in self._numbers], dim=-1) if own is None else own

    def _state(self, output: Any, layer: int) -> Tensor:
        if layer <= self._count:
            state: Tensor = output.hidden_states[layer]
            return state
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
