"""What the loopback server answers: its faults, what it receives, and the JSON of its events."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Faults:
    """How the server answers. The defaults are a server without faults; assign a new value at any time.

    status, message: answer every POST with this error. redirect: answer every request with status 307 to this address.
    silent: accept requests and never answer. first_delay, chunk_delay: seconds before the first and each further chunk.
    cut_after: close the connection after so many tokens: without [DONE], or in the middle of a chunk if `abrupt`,
    or reset if `reset`. die_after: the same, and the server is gone until `revive`.
    broken_json: the body, or the data of one event, is not JSON. odd_json: valid JSON of the wrong shape.
    html: a page instead of an answer. broken_sse: lines that are no server-sent events, and no events.
    error_in_stream: an error object instead of the third event. tokens_per_chunk: tokens in each chunk.
    usage: whether tokens are counted. ids: whether chunks have `token_ids`. wordy: ignores max_tokens and never ends.
    trickles: "headers" or "body" of every page, or the "end" of a stream, a byte at a time for ever. content_type: of
    streams.
    """

    status: int | None = None
    message: str = "the request was refused"
    redirect: str | None = None
    silent: bool = False
    first_delay: float = 0.0
    chunk_delay: float = 0.0
    cut_after: int | None = None
    abrupt: bool = False
    reset: bool = False
    die_after: int | None = None
    broken_json: bool = False
    odd_json: bool = False
    html: bool = False
    broken_sse: bool = False
    error_in_stream: bool = False
    tokens_per_chunk: int = 1
    usage: bool = True
    ids: bool = True
    wordy: bool = False
    trickles: str = ""
    content_type: str = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Received:
    """A request. headers: lower-case names. body: the parsed JSON, None for GET."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    at: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request is answered with. pieces: the text of each token."""

    prompt_tokens: int
    ids: Sequence[int]
    pieces: Sequence[str]
    finish: str

    @property
    def usage(self) -> dict[str, int]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.ids)}
        return counts | {"total_tokens": self.prompt_tokens + len(self.ids)}


def chunk(request: Received, answer: Answer, part: slice, *, streamed: bool, ids: bool = True) -> dict[str, Any]:
    """An event with some of the tokens, or the whole answer, in the form that the address demands."""
    chat, text = request.path.endswith("chat/completions"), "".join(answer.pieces[part])
    choice: dict[str, Any] = {"index": 0, "finish_reason": None if streamed else answer.finish}
    if chat:
        choice["delta" if streamed else "message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    if ids and request.body.get("return_token_ids"):
        choice["token_ids"] = list(answer.ids[part])
    kind = "chat.completion" if chat else "text_completion"
    return {"id": "c-1", "object": kind, "created": 0, "model": request.body.get("model"), "choices": [choice]}


def event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def error(status: int, message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}})
