"""Facts that a model's config states: its name, vocabulary, context length, and where its layers are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError


def model_name(model: Any) -> str:
    """A name for messages."""
    return str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or type(model).__name__)


def check_model(model: Any, argument: str, remedy: str = "") -> None:
    """Raise UserError if an argument of a library function is not a model."""
    if getattr(model, "config", None) is None or not callable(model):
        raise UserError(f"{argument} must be a transformers model, not {type(model).__name__}{remedy}.")


def vocabulary_size(model: Any) -> int:
    """The width of the model's logits."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def context_length(model: Any) -> int | None:
    """The maximum number of positions, or None if the model has no such bound (relative positions, recurrence)."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return int(length) if isinstance(length, int) and length > 0 else None


def cache_bytes(model: Any, tokens: int) -> int:
    """The bytes of the keys and values of so many tokens in float32, or of as many as the model can read. An estimate:
    0 for a model without attention.
    """
    config = model.config.get_text_config(decoder=True)
    layers = [config] * getattr(config, "num_hidden_layers", 0)
    if getattr(config, "is_heterogeneous", False):
        layers = [*config.per_layer_config]
    return 2 * 4 * sum(map(_key_size, layers)) * min(tokens, context_length(model) or tokens)


def _key_size(config: Any) -> int:
    """The numbers of a token's key in a layer with this config."""
    queries = getattr(config, "num_attention_heads", None) or 0
    heads = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, queries)
    return int(heads * size)


def hidden_features(output: Any, layers: Sequence[int]) -> Tensor:
    """The hidden states after each of these layers, concatenated to (B, T, F). Layer -1 is the last one, after the
    final norm.
    """
    return torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)


def is_spread(model: Any) -> bool:
    """Whether accelerate keeps the model's layers on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
