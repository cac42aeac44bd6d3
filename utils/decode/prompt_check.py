"""Whether a model can read a prompt: its ids, its length, and the memory that it takes."""

from collections.abc import Sequence
from typing import Any

from utils.decode.model_info import cache_bytes, context_length, model_name, vocabulary_size
from utils.errors import ContextOverflow, UserError
from utils.freed_memory import available_memory
from utils.text import byte_size, count_of

GROWTH = 1.5  # a KV cache has room for so many times its tokens
NEGLIGIBLE = 1 << 26  # bytes of keys and values for which nothing is checked


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
    """Raise UserError if the KV caches of a run of so many tokens do not fit into memory.

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
