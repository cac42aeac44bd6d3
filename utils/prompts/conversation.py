"""Conversations: the prompts and answers of every strategy so far, and the token ids of a prompt that follows them.

Each strategy continues its own answers, so that its third answer is the same as if it ran alone. The ids of prompts,
and those that end an answer, are read from the model and its chat template, never from a list of known models. The
template yields ids directly: rendering text and tokenizing it again would double the first token of many models.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from utils.decode.model_info import vocabulary_size
from utils.decode.steps import matching_prefix
from utils.errors import ContextOverflow, UserError
from utils.models.load_errors import first_line
from utils.text import encodable

ANSWER = "ANSWERMARK"  # a sample answer; letters only, so that no template trims or escapes it
Message = dict[str, Any]  # role and content, as in chat templates and records; tools add further fields


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer, as text."""

    user: str
    assistant: str


Turns = tuple[Turn, ...]


@dataclass(slots=True)
class Conversations:
    """The conversations of strategies with a finished turn, by strategy name."""

    by_name: dict[str, Turns] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of turns of the longest conversation."""
        return max(map(len, self.by_name.values()), default=0)

    def history(self, name: str, baseline: str) -> Turns:
        """The turns that a strategy continues: its own, or the baseline's if these extend its own."""
        own, theirs = self.by_name.get(name, ()), self.by_name.get(baseline, ())
        return theirs if theirs[: len(own)] == own else own

    def forget(self) -> None:
        self.by_name.clear()


def to_messages(turns: Sequence[Turn]) -> list[Message]:
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in (("user", turn.user), ("assistant", turn.assistant))
    ]


def turns_from_messages(messages: Sequence[Message]) -> Turns:
    """The inverse of `to_messages`."""
    contents = [message["content"] for message in messages]
    return tuple(map(Turn, contents[::2], contents[1::2]))


def diverging_turn(ours: Turns, theirs: Turns) -> int:
    """The number, from 1, of the first turn before which two different conversations differ."""
    # The turn after the equal ones differs itself, after an equal history. The next one has a different history.
    return matching_prefix(ours, theirs) + 2


def with_reset_hint(error: Exception, turns: Turns) -> Exception:
    """The error itself. If earlier turns made a prompt too long, the message recommends /turns new."""
    if turns and isinstance(error, ContextOverflow):
        return UserError(f"{error} /turns new forgets the conversation.")
    return error


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end an answer: those of the generation config, the tokenizer and the chat template."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    if invalid := [token for token in ids if token is not None and type(token) is not int]:
        raise UserError(
            f"The end token {str(invalid[0])[:40]!r} of '{model.name_or_path}' is not a token id: "
            "correct its generation_config.json."
        )
    return frozenset(token for token in [*ids, tokenizer.eos_token_id, _turn_end(tokenizer)] if token is not None)


def unknown_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[str, ...]:
    """A message for the user if the tokenizer has tokens without an embedding in the model."""
    size = vocabulary_size(model)  # once, because reading a config takes long
    beyond = sum(token >= size for token in tokenizer.get_vocab().values())
    if not beyond:
        return ()
    return (f"{name}: {beyond:,} tokens of its tokenizer are unknown to the model; prompts with them are refused",)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    chat: bool,
    system: str | None,
    special: bool = False,
    history: Sequence[Turn] = (),
    request: str = "",
) -> list[int]:
    """The token ids of a prompt. `request` has the other fields of the request, which a chat template may use.

    A `system` of None is the template's default. Unless `special`, names of special tokens are ordinary text, so that
    neither a user nor a model can end a turn by writing about end tokens. Raises UserError if there are no ids, no chat
    template, or the template does not support a system prompt.
    """
    # Plain text also gets the tokens that the tokenizer adds, such as a first token.
    fields: dict[str, Any] = json.loads(request) if chat and request else {}
    messages = conversation_messages(text, system if chat else None, history if chat else (), fields)
    inputs = {"conversation": messages, **_template_options(tokenizer, fields)}
    names = () if special else _names_in(tokenizer, inputs)
    if not chat:
        ids = tokenizer(encodable(text), **({"split_special_tokens": True} if names else {}))["input_ids"]
    elif names:
        ids = _ids_with_names_as_text(tokenizer, inputs, names)
    else:
        ids = _rendered(tokenizer, inputs, return_dict=True)["input_ids"]
    if not ids and chat:
        raise UserError("The chat template of this model gives no text for this prompt: use /chat off.")
    if not ids:
        raise UserError("The prompt is empty: type at least one character.")
    return list(ids)


def conversation_messages(
    text: str, system: str | None, history: Sequence[Turn], fields: Mapping[str, Any]
) -> list[Message]:
    """The whole conversation in the form that templates expect. `fields` are the other fields of the request."""
    earlier = fields.get("messages", ())
    is_replaced = any(message["role"] == "system" for message in earlier)  # by the request's own system prompt
    opening = [] if system is None or is_replaced else [{"role": "system", "content": encodable(system)}]
    turns = [turn | {"content": encodable(turn["content"])} for turn in to_messages(history)]
    return [*opening, *earlier, *turns, {"role": "user", "content": encodable(text), **fields.get("last", {})}]


def _template_options(tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tools and the keywords of the template. Raises UserError for a keyword with another meaning."""
    keywords: dict[str, Any] = fields.get("chat_template_kwargs", {})
    known = inspect.signature(tokenizer.apply_chat_template).parameters
    if wrong := [name for name in keywords if name in known and name != "documents"]:
        raise UserError(
            f"chat_template_kwargs: {wrong[0]} is not a keyword of a template, for example enable_thinking."
        )
    return keywords | ({"tools": fields["tools"]} if "tools" in fields else {})


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with changed texts, those in lists and objects included."""
    if isinstance(value, dict):
        return {name: _with_texts(part, change) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_texts(part, change) for part in value]
    return change(value) if isinstance(value, str) else value


def _names_in(tokenizer: PreTrainedTokenizerBase, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of special tokens in the texts of the inputs, longest first."""
    texts = json.dumps(inputs)
    names = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special and added.content}
    present = (name for name in names if json.dumps(name)[1:-1] in texts)  # without its quotation marks
    return tuple(sorted(present, key=len, reverse=True))  # a regex takes the first alternative that matches


def _ids_with_names_as_text(
    tokenizer: PreTrainedTokenizerBase, inputs: Mapping[str, Any], names: tuple[str, ...]
) -> list[int]:
    """Names pass through the template as placeholders and are tokenized separately from the text of the template."""
    placeholder, texts = "NAMEMARK", json.dumps(inputs)
    while placeholder in texts:
        placeholder += "X"
    replaced: list[str] = []

    def replace(name: re.Match[str]) -> str:
        replaced.append(name[0])
        # END separates the number from digits that follow the name.
        return f"{placeholder}{len(replaced) - 1}END"

    pattern = "|".join(map(re.escape, names))
    masked = _with_texts(inputs, lambda text: re.sub(pattern, replace, text))
    rendered: str = _rendered(tokenizer, masked, tokenize=False)
    ids: list[int] = []
    for index, piece in enumerate(re.split(f"{placeholder}([0-9]+)END", rendered)):
        is_name = index % 2 == 1  # re.split alternates text and captured numbers
        text = replaced[int(piece)] if is_name else piece
        ids += tokenizer(text, add_special_tokens=False, split_special_tokens=is_name)["input_ids"]
    return ids


def _rendered(tokenizer: PreTrainedTokenizerBase, inputs: Mapping[str, Any], **options: Any) -> Any:
    """Apply the chat template to the messages of a conversation that ends with a prompt, and to its other inputs."""
    if not has_chat_template(tokenizer):
        raise UserError("This model has no chat template: use /chat off to send the prompt as plain text.")
    try:
        return tokenizer.apply_chat_template(add_generation_prompt=True, **inputs, **options)
    except Exception as error:  # templates are sandboxed code: after any error in one, plain text can still be sent
        refusal = _refusal(inputs["conversation"]).format(first_line(error))
        raise UserError(f"The chat template of this model {refusal}") from error


def _refusal(messages: list[Message]) -> str:
    """The likely reason why a template fails on these messages, and the remedy."""
    roles = [message["role"] for message in messages]
    if "assistant" in roles:
        return "cannot render the conversation ({}): start a new one with /turns new, or use /turns off."
    if "system" in roles:
        return "does not support a system prompt ({}): use /system default."
    return "cannot render the prompt ({}): use /chat off."


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token that the chat template writes after an answer."""
    if not has_chat_template(tokenizer):
        return None
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    try:
        rendered: Any = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # as above; the other end ids remain
        return None
    # The text after the answer is tokenized alone, because the answer's last token may merge with what follows.
    tail = tokenizer(rendered.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return next((token for token in tail if token in special), None)
