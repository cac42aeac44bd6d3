"""Turns a prompt and the settings into a request for a server.

Token ids are sent only if the server's tokenizer yields the same ids as the local one. Otherwise the request has the
messages of a chat, or plain text with /chat off.
"""

from collections.abc import Callable
from typing import Any

from utils.comparison.harness import Harness
from utils.config.settings import Settings
from utils.errors import UserError
from utils.prompts.conversation import Message, Turns, to_messages
from utils.servers.client import ServerClient
from utils.servers.connection import RequestFor
from utils.servers.kinds.completion import Chat, ServerRequest
from utils.servers.kinds.server_kind import ServerKind

NO_TEXT = "the prompt is empty."


def request_maker(harness: Harness, text: str, settings: Settings, history: Turns = ()) -> RequestFor:
    """A function that makes the request for a server kind. Raises UserError for an empty prompt."""
    if not text:
        raise UserError(NO_TEXT)
    processor = settings.processor

    def make(kind: ServerKind, server: ServerClient) -> ServerRequest:
        return ServerRequest(
            _prompt(harness, text, settings, history)(kind, server),
            settings.length,
            temperature=processor.effective_temperature,
            top_k=processor.top_k or 0,
            top_p=1.0 if processor.top_p is None else processor.top_p,
            seed=settings.seed,
        )

    return make


def _prompt(
    harness: Harness, text: str, settings: Settings, history: Turns
) -> Callable[[ServerKind, ServerClient], str | tuple[int, ...] | Chat]:
    def choose(kind: ServerKind, server: ServerClient) -> str | tuple[int, ...] | Chat:
        if harness.has_pair and kind.takes_token_ids and _same_tokenizer(harness.pair.tokenizer, text, kind, server):
            return tuple(harness.prompt_ids(text, settings, history))
        return Chat(tuple(_messages(text, settings, history))) if settings.uses_chat else text

    return choose


def _same_tokenizer(tokenizer: Any, text: str, kind: ServerKind, server: ServerClient) -> bool:
    """Whether the server and the local tokenizer yield the same ids for the prompt."""
    return kind.tokens(server, text) == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _messages(text: str, settings: Settings, history: Turns) -> list[Message]:
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    return [*system, *to_messages(history), {"role": "user", "content": text}]
