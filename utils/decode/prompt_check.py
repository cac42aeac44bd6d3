"""Whether a model can read a prompt: its ids and its length."""

from typing import Any

from utils.decode.model_info import context_length, model_name, vocabulary_size
from utils.errors import ContextOverflow, UserError
from utils.text import count_of


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
