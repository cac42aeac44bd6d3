"""Any server with OpenAI's protocol and nothing else: https://platform.openai.com/docs/api-reference/completions.

The other kinds inherit from it and change what their engines do differently.
"""

from collections.abc import Mapping
from typing import Any

from utils.errors import UserError
from utils.servers.completion import Event, Piece, ServerCompletion
from utils.servers.engines.kind import Counters, EngineAcceptance, ServerReader
from utils.servers.failures import ServerError
from utils.servers.request import Chat, ServerRequest

INTERNAL_ERROR = 500  # the first status of errors that are the server's own


class OpenAIKind:
    """The fallback: text prompts and chats, tokens counted by usage, and nothing about drafts."""

    @property
    def name(self) -> str:
        return "openai"

    @property
    def takes_token_ids(self) -> bool:
        return False

    def recognises(self, server: ServerReader) -> bool:
        return True

    def tokens(self, server: ServerReader, text: str | Chat, *, special: bool = False) -> tuple[int, ...] | None:
        return None

    def path(self, request: ServerRequest) -> str:
        return "/v1/chat/completions" if request.is_chat else "/v1/completions"

    def body(self, request: ServerRequest, model: str) -> dict[str, Any]:
        """The fields that OpenAI's protocol has, and those of the engine."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if isinstance(request.prompt, Chat):
            body["messages"] = [dict(message) for message in request.prompt.messages]
        elif isinstance(request.prompt, str):
            body["prompt"] = request.prompt
        elif self.takes_token_ids:
            body["prompt"] = list(request.prompt)
        else:
            raise UserError(f"a server of the kind {self.name} takes no token ids.")
        return body | self.logprob_fields(request) | self.engine_fields(request)

    def logprob_fields(self, request: ServerRequest) -> dict[str, Any]:
        """The fields that ask for log-probabilities, which differ between completions and chats."""
        if not request.top_logprobs:
            return {}
        if request.is_chat:
            return {"logprobs": True, "top_logprobs": request.top_logprobs}
        return {"logprobs": request.top_logprobs}

    def engine_fields(self, request: ServerRequest) -> dict[str, Any]:
        """Fields beyond OpenAI's protocol. Raises UserError for what cannot be expressed without them."""
        if request.top_k:
            raise UserError(f"a server of the kind {self.name} has no top-k sampling; choose another /processor.")
        return {}

    def read(self, event: Event) -> Piece:
        """The first choice of an event, and its usage figures. Reasoning counts as text, because it is generated."""
        usage = event.get("usage") or {}
        prompt_tokens, new_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not event.get("choices"):  # the last event has the usage alone
            return Piece(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        choice = event["choices"][0]
        if "delta" in choice:
            delta = choice["delta"] or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = reasoning + (delta.get("content") or "")
        else:
            text = choice.get("text") or ""
        return Piece(text, self.token_ids(event), choice.get("finish_reason") or "", prompt_tokens, new_tokens)

    def token_ids(self, event: Event) -> tuple[int, ...] | None:
        """The ids of the tokens of an event, or None if it has none."""
        return None

    def counters(self, server: ServerReader) -> Counters:
        return {}

    def acceptance(self, completion: ServerCompletion, before: Counters, after: Counters) -> EngineAcceptance | None:
        return None


class TokenIdKind(OpenAIKind):
    """What vLLM and SGLang share: completions take and give token ids, and /tokenize answers with them."""

    @property
    def takes_token_ids(self) -> bool:
        return True

    def tokens(self, server: ServerReader, text: str | Chat, *, special: bool = False) -> tuple[int, ...] | None:
        return tokenized_prompt(server, text, special=special)

    def token_ids(self, event: Event) -> tuple[int, ...] | None:
        ids = event["choices"][0].get("token_ids")
        return None if ids is None else tuple(ids)


def tokenized_prompt(server: ServerReader, text: str | Chat, *, special: bool) -> tuple[int, ...] | None:
    """The ids of a text or a chat by the /tokenize that vLLM and SGLang have."""
    if isinstance(text, str):
        return tokenized(server, {"prompt": text, "add_special_tokens": special})
    messages = [dict(message) for message in text.messages]
    return tokenized(server, {"messages": messages, "add_generation_prompt": True})


def tokenized(server: ServerReader, body: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The ids that a server's /tokenize answers, or None if it has none or answers something else."""
    found = server.post_json("/tokenize", body)
    ids = found.get("tokens") if isinstance(found, dict) else None
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        return None
    return tuple(ids)


def owner_of(server: ServerReader) -> str:
    """Who offers the first model in the server's list: engines write their own name there. "" if it is not known."""
    try:
        return str(server.get_json("/v1/models")["data"][0]["owned_by"])
    except (LookupError, TypeError):
        return ""
    except ServerError as error:
        # `transformers serve` fails there if there is no folder of downloaded models, and answers all the same.
        if (error.status or 0) < INTERNAL_ERROR:
            raise
        return ""
