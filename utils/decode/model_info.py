"""Facts from a model's config (its name, vocabulary, context length, the place of its layers), and whether a prompt
fits.
"""

from collections.abc import Sequence
from typing import Any

from utils.errors import ContextOverflow, UserError
from utils.freed_memory import available_memory
from utils.text import byte_size, count_of

GROWTH = 1.5  # room of a KV cache relative to its tokens
NEGLIGIBLE = 1 << 26  # bytes of keys and values for which nothing is checked


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


def sample_ids(count: int, vocabulary: int) -> list[int]:
    """Token ids that are spread over the vocabulary."""
    # 7919 is a prime: unless the vocabulary is a multiple of it, no id repeats before all have occurred.
    return [(7919 * (index + 1)) % vocabulary for index in range(count)]


def context_length(model: Any) -> int | None:
    """The maximum number of positions, or None if the model has no such bound (relative positions, recurrence)."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return int(length) if isinstance(length, int) and length > 0 else None


def cache_bytes(model: Any, tokens: int) -> int:
    """The bytes of the keys and values of this many tokens in float32, but at most of the model's context.

    An estimate: 0 for a model without attention.
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


def is_spread(model: Any) -> bool:
    """Whether accelerate keeps the model's layers on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def check_prompt(prompt: list[int], model: Any) -> None:
    """Raise UserError for an empty prompt or ids outside the vocabulary, ContextOverflow if no token fits after it."""
    if not prompt:
        raise UserError("The prompt is empty: at least one token id is needed.")
    size, name, limit = vocabulary_size(model), model_name(model), context_length(model)
    if not 0 <= min(prompt) <= max(prompt) < size:
        raise UserError(
            f"The prompt holds token ids outside 0..{size - 1}, the vocabulary of {name}: "
            "check that the tokenizer belongs to this model."
        )
    if limit is None:
        return
    # The output of an encoder-decoder model has a context of its own.
    longest = limit - (0 if model.config.is_encoder_decoder else 1)
    if len(prompt) > longest:
        raise ContextOverflow(
            f"The prompt has {count_of(len(prompt), 'token')}; {name} has a context length of {limit}, so a prompt may "
            f"have at most {longest}."
        )


def check_memory(models: Sequence[Any], tokens: int, *, remedy: str) -> None:
    """Raise UserError if the KV caches of a run of this many tokens do not fit into memory.

    Only for models on the CPU: other devices report a lack of memory themselves, but there the system would kill the
    program.
    """
    need = int(GROWTH * sum(cache_bytes(model, tokens) for model in models if model.device.type == "cpu"))
    if need < NEGLIGIBLE or need <= (free := available_memory()):
        return
    fitting = int(tokens * free / need)
    raise UserError(
        f"The keys and values of {count_of(tokens, 'token')} need {byte_size(need)} of memory, and {byte_size(free)} "
        f"are available, enough for {fitting}: {remedy}."
    )
