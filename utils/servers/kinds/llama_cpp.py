"""llama.cpp's server: token ids both ways through its own /completion, and draft counts in `timings`.

Read in tools/server (server-context.cpp, server-task.cpp, server-schema.cpp). `draft_n` counts the drafts that are
verified, after they were shortened to the rest of the answer; `draft_n_accepted` does not contain the bonus token.
`predicted_n` contains the token of the prefill. So every forward pass yields one token more than it accepts.
"""

from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar

from utils.servers.kinds.completion import (
    Chat,
    Counters,
    Event,
    Piece,
    ServerAcceptance,
    ServerCompletion,
    ServerRequest,
)
from utils.servers.kinds.server_kind import ODD_FIGURES, ServerKind, ServerReader, growth, tokenized, with_positions

GENERATED = "tokens_predicted"
LARGEST_SEED = 2**32 - 1  # a random seed
FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
# Its default order filters before the temperature, and enables further samplers.
SAMPLERS = ("temperature", "top_k", "top_p")


class LlamaCppKind(ServerKind):
    """`llama-server`. Ids are streamed by /completion only, so chats are counted by usage.

    A streamed event has only the last token of a character that several tokens make up. Such an answer has fewer ids
    than `tokens_predicted`, and ServerCompletion.token_ids is None.
    """

    name: ClassVar[str] = "llama.cpp"
    owner: ClassVar[str] = "llamacpp"
    takes_token_ids: ClassVar[bool] = True
    generated: ClassVar[str] = GENERATED
    prefix: ClassVar[str] = "llamacpp:"  # of /metrics, which exists only with the option --metrics
    figures: ClassVar[tuple[str, ...]] = ("timings",)
    setup_page: ClassVar[str] = "/props"

    def tokens(self, server: ServerReader, text: str | Chat, *, special: bool = False) -> tuple[int, ...] | None:
        if isinstance(text, Chat):
            found = server.get_json("/apply-template", {"messages": [dict(message) for message in text.messages]})
            if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
                return None
            # A first token that the tokenizer adds is left out of the template's text.
            text, special = found["prompt"], True
        return tokenized(server, {"content": text, "add_special": special, "parse_special": True})

    def path(self, request: ServerRequest) -> str:
        return super().path(request) if request.is_chat else "/completion"

    def body(self, request: ServerRequest, model: str) -> dict[str, Any]:
        if isinstance(request.prompt, Chat):
            return super().body(request, model)
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        return {
            "model": model,
            "prompt": prompt,
            "n_predict": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "return_tokens": True,
            "stream": True,
        } | self.further_fields(request)

    def further_fields(self, request: ServerRequest) -> dict[str, Any]:
        fields = {
            "top_k": request.top_k,
            "samplers": list(SAMPLERS),
            "ignore_eos": request.ignore_eos,
            "cache_prompt": request.reuses_prefix,
        }
        return fields if request.seed is None else fields | {"seed": request.seed % LARGEST_SEED}

    def read(self, event: Event) -> Piece:
        if "choices" in event:
            return super().read(event)
        ids = tuple(event["tokens"]) if "tokens" in event else None
        if not event["stop"]:
            return Piece(event["content"], ids)
        finish = FINISH.get(event.get("stop_type", ""), "stop")
        return Piece(event["content"], ids, finish, event.get("tokens_evaluated"), event["tokens_predicted"])

    def own_rate(self, figures: Mapping[str, Any]) -> float | None:
        """Its clock starts at the first token."""
        try:
            rate: float = 1000 * (figures["timings"]["predicted_n"] - 1) / figures["timings"]["predicted_ms"]
            return rate if 0 < rate < inf else None
        except ODD_FIGURES:
            return None

    def drafts(self, completion: ServerCompletion, before: Counters, after: Counters) -> ServerAcceptance | None:
        """The answer's own timings. Verify passes and positions come from the counters if those grew by the same
        numbers.
        """
        timings = completion.figures.get("timings")
        if not timings or not timings.get("draft_n"):
            return None
        drafted, accepted, tokens = (timings[name] for name in ("draft_n", "draft_n_accepted", "predicted_n"))
        found, grown = ServerAcceptance(drafted, accepted, forwards=tokens - accepted), growth(before, after) or {}
        return with_positions(found, grown) if grown.get(GENERATED) == tokens else found
