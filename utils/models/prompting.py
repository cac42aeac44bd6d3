"""From a typed text to prompt ids, and which ids end an answer: what a tokenizer and its chat template decide.

Both are read from the model and the template, never from a list of known names. Ids come straight from the template: rendering to text
and tokenizing that again would double the first token on many models.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.caching import vocabulary_size
from utils.errors import UserError
from utils.models.failures import first_line
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
    return (f"{name}: its tokenizer has {beyond:,} tokens that the model does not know; prompts that hold one are refused",)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer can render a conversation."""
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool, system: str | None, special: bool = False) -> list[int]:
    """The ids to feed for `text`.

    With `chat`, `system` is the system prompt: None leaves it to the template, "" asks for an empty one. Where `special` is False, the
    names of special tokens in either are text like any other: nobody ends a turn by writing about how turns end.

    Raises UserError when the text gives no ids, when there is no chat template, or when the template takes no system prompt.
    """
    # Plain text still gets what the tokenizer itself puts around it, such as a first token.
    text = encodable(text)
    names = () if special else _names_in(tokenizer, text + (system or ""))
    if not chat:
        ids = tokenizer(text, **({"split_special_tokens": True} if names else {}))["input_ids"]
    elif names:
        ids = _ids_with_names_as_text(tokenizer, text, system, names)
    else:
        ids = _rendered(tokenizer, text, system, return_dict=True)["input_ids"]
    if not ids:
        raise UserError("The prompt is empty: it gives no tokens, so type at least one character.")
    return list(ids)


def _names_in(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, ...]:
    """The names of special tokens that the text holds, longer ones first."""
    names = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    return tuple(sorted((name for name in names if name and name in text), key=len, reverse=True))


def _ids_with_names_as_text(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None, names: tuple[str, ...]) -> list[int]:
    """Names go through the template as marks, and are tokenized apart from what the template writes."""
    mark = "NAMEMARK"
    while mark in text + (system or ""):
        mark += "X"
    found: list[str] = []

    def marked(part: str) -> str:
        def replaced(name: re.Match[str]) -> str:
            found.append(name[0])
            return f"{mark}{len(found) - 1}END"

        return re.sub("|".join(map(re.escape, names)), replaced, part)

    rendered: str = _rendered(tokenizer, marked(text), None if system is None else marked(system), tokenize=False)
    ids: list[int] = []
    for place, piece in enumerate(re.split(f"{mark}([0-9]+)END", rendered)):
        name = place % 2 == 1
        ids += tokenizer(found[int(piece)] if name else piece, add_special_tokens=False, split_special_tokens=name)["input_ids"]
    return ids


def _rendered(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None, **options: Any) -> Any:
    """What the chat template makes of a prompt."""
    if not has_chat_template(tokenizer):
        raise UserError("This model has no chat template: switch it off with /chat off, the prompt is then fed as it stands.")
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": text})
    try:
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, **options)
    except FAILURES as error:
        if system is None:
            raise UserError(
                f"The chat template of this model cannot render the prompt ({first_line(error)}): switch it off with /chat off."
            ) from error
        raise UserError(f"The chat template of this model takes no system prompt ({first_line(error)}): use /system default.") from error


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
