"""From a typed text to prompt ids, and which ids end an answer: what a tokenizer and its chat template decide.

Both are read from the model and the template, never from a list of known names. Ids come straight from the template: rendering to text
and tokenizing that again would double the first token on many models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.decode.model_session import vocabulary_size
from utils.errors import UserError
from utils.models.load_errors import first_line
from utils.prompts.conversation import Message, Turn, messages_of
from utils.text import encodable

# Templates are code in a sandbox: whatever they do wrong, the pair is still good for plain text.
FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# Stands for an answer; letters only, so that no template trims or escapes it.
ANSWER = "ANSWERMARK"


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id after which an answer is over: the model's, the tokenizer's and the chat template's."""
    configured = model.generation_config.eos_token_id
    found = configured if isinstance(configured, list) else [configured]
    if wrong := [token for token in found if token is not None and type(token) is not int]:
        raise UserError(
            f"'{model.name_or_path}' names {str(wrong[0])[:40]!r} as its end token, which is no token id: mend its generation_config.json."
        )
    return frozenset(token for token in [*found, tokenizer.eos_token_id, _turn_end(tokenizer)] if token is not None)


def unknown_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[str, ...]:
    """A note where the tokenizer has tokens that the model has no embedding for."""
    beyond = sum(token >= vocabulary_size(model) for token in tokenizer.get_vocab().values())
    if not beyond:
        return ()
    return (
        f"{name}: its tokenizer has {beyond:,} tokens that the model does not know; prompts that hold one are refused",
    )


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer can render a conversation."""
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    chat: bool,
    system: str | None,
    special: bool = False,
    history: Sequence[Turn] = (),
) -> list[int]:
    """The ids to feed for `text`.

    With `chat`, `system` is the system prompt: None leaves it to the template, "" asks for an empty one; `history` is what was said
    before. Where `special` is False, the names of special tokens in any of it are text like any other: nobody, and no model, ends a turn
    by writing about how turns end.

    Raises UserError when the text gives no ids, when there is no chat template, or when the template takes no system prompt.
    """
    # Plain text still gets what the tokenizer itself puts around it, such as a first token.
    messages = _messages(text, system, history) if chat else [{"role": "user", "content": encodable(text)}]
    names = () if special else _names_in(tokenizer, messages)
    if not chat:
        ids = tokenizer(encodable(text), **({"split_special_tokens": True} if names else {}))["input_ids"]
    elif names:
        ids = _ids_with_names_as_text(tokenizer, messages, names)
    else:
        ids = _rendered(tokenizer, messages, return_dict=True)["input_ids"]
    if not ids:
        raise UserError("The prompt is empty: it gives no tokens, so type at least one character.")
    return list(ids)


def _messages(text: str, system: str | None, history: Sequence[Turn]) -> list[Message]:
    """The whole conversation, as templates take it."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = [*opening, *messages_of(history), {"role": "user", "content": text}]
    return [message | {"content": encodable(message["content"])} for message in messages]


def _names_in(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, ...]:
    """The names of special tokens that the messages hold, longer ones first."""
    names = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    held = (name for name in names if name and any(name in message["content"] for message in messages))
    return tuple(sorted(held, key=len, reverse=True))


def _ids_with_names_as_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], names: tuple[str, ...]
) -> list[int]:
    """Names go through the template as marks, and are tokenized apart from what the template writes."""
    mark = "NAMEMARK"
    while any(mark in message["content"] for message in messages):
        mark += "X"
    found: list[str] = []

    def replaced(name: re.Match[str]) -> str:
        found.append(name[0])
        return f"{mark}{len(found) - 1}END"

    pattern = "|".join(map(re.escape, names))
    marked = [message | {"content": re.sub(pattern, replaced, message["content"])} for message in messages]
    rendered: str = _rendered(tokenizer, marked, tokenize=False)
    ids: list[int] = []
    for place, piece in enumerate(re.split(f"{mark}([0-9]+)END", rendered)):
        name = place % 2 == 1
        ids += tokenizer(found[int(piece)] if name else piece, add_special_tokens=False, split_special_tokens=name)[
            "input_ids"
        ]
    return ids


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **options: Any) -> Any:
    """What the chat template makes of a conversation that a prompt ends."""
    if not has_chat_template(tokenizer):
        raise UserError(
            "This model has no chat template: switch it off with /chat off, the prompt is then fed as it stands."
        )
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except FAILURES as error:
        raise UserError(f"The chat template of this model {_refusal(messages).format(first_line(error))}") from error


def _refusal(messages: list[Message]) -> str:
    """What a template that fails on these messages seems not to take."""
    roles = [message["role"] for message in messages]
    if "assistant" in roles:
        return "cannot render the conversation ({}): begin a new one with /reset, or keep none with /turns off."
    if "system" in roles:
        return "takes no system prompt ({}): use /system default."
    return "cannot render the prompt ({}): switch it off with /chat off."


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token that the chat template writes after an answer."""
    if not has_chat_template(tokenizer):
        return None
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    try:
        rendered: Any = tokenizer.apply_chat_template(turns, tokenize=False)
    except FAILURES:
        # Whatever a template does with an exchange, the other end ids remain.
        return None
    # The text after the answer, not the ids: the answer's last token may have merged with what follows.
    tail = tokenizer(rendered.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return next((token for token in tail if token in special), None)
