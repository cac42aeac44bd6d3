"""One completion of a server: what is requested, what has arrived and when, and what happened to the drafts.

Stream chunks are not tokens: a server may put several tokens into one. Tokens are counted by their ids or by the
server's own usage figures, never by chunks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from utils.decode.steps import FinishReason

Event = Mapping[str, Any]  # the JSON object of one stream chunk
Counters = Mapping[str, float]  # a server's own figures at one moment, by their names


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt as messages with a role and a content, which the server puts into its own chat template."""

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One streamed completion in the words of this program. A server kind writes it in those of its server.

    prompt: a text, token ids, or the messages of a chat. max_tokens: maximum number of new tokens. temperature: 0 is
    greedy. top_k: 0 means no limit. seed: of the sampling. ignore_eos: whether to continue after an end token, where
    the server can. reuses_prefix: whether the server may reuse what it computed for an earlier request.
    """

    prompt: str | tuple[int, ...] | Chat
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    reuses_prefix: bool = False

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, Chat)


class CountedBy(StrEnum):
    """Where a number of tokens is from."""

    IDS = "token ids"
    USAGE = "usage"
    NOTHING = "unknown"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to the answer, as a server kind reads it.

    token_ids: of this event, None if the server gives no ids. finish_reason: in the server's words, "" until the last
    piece. prompt_tokens, new_tokens: usage figures of the whole request, where this event has them.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str = ""
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    @property
    def has_content(self) -> bool:
        """Whether anything of the answer arrived with it. The end token comes with the finish reason."""
        return bool(self.text or self.token_ids or self.finish_reason)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece with content. seconds: since the request was sent."""

    seconds: float
    piece: Piece


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """One finished or interrupted answer.

    text: without the server's key, should it contain that. arrivals: of the pieces with content, in order, as they were
    sent. finish: why it ended; finish_reason: the same in the server's words. seconds: from the request to the end of
    the stream. prompt_tokens, usage_tokens: as the server counts them. events: all JSON objects of the stream.
    """

    text: str
    arrivals: tuple[Arrival, ...]
    finish: FinishReason
    finish_reason: str
    seconds: float
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    events: tuple[Event, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """The ids of all new tokens, or None if the server does not give them for all of its text."""
        pieces = [arrival.piece for arrival in self.arrivals]
        if not any(piece.token_ids for piece in pieces):
            return None
        if any(piece.text and piece.token_ids is None for piece in pieces):
            return None
        ids = tuple(token for piece in pieces for token in piece.token_ids or ())
        # llama.cpp leaves out ids of characters that several tokens make up.
        return ids if self.usage_tokens in (None, len(ids)) else None

    @property
    def token_count(self) -> int | None:
        """Number of new tokens, or None if it is unknown."""
        ids = self.token_ids
        return self.usage_tokens if ids is None else len(ids)

    @property
    def counted_by(self) -> CountedBy:
        if self.token_ids is not None:
            return CountedBy.IDS
        return CountedBy.NOTHING if self.usage_tokens is None else CountedBy.USAGE

    @property
    def first_seconds(self) -> float | None:
        """Time to the first token in seconds."""
        return self.arrivals[0].seconds if self.arrivals else None

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from the first piece with content to the last one."""
        return self.arrivals[-1].seconds - self.arrivals[0].seconds if self.arrivals else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first piece per second after it, or None if there are none.

        The first piece counts as one token where its ids are not known.
        """
        count, seconds = self.token_count, self.decode_seconds
        if count is None or not seconds:
            return None
        later = count - (len(self.arrivals[0].piece.token_ids or ()) if self.token_ids is not None else 1)
        return later / seconds if later > 0 else None

    def field(self, name: str) -> Any:
        """The last value of a top-level field of the events, or None if no event has it."""
        return next((event[name] for event in reversed(self.events) if event.get(name) is not None), None)


def finish_of(reason: str) -> FinishReason:
    """The reason why a finished answer ended, from the server's word for it."""
    return FinishReason.LENGTH if reason in ("length", "limit", "max_tokens") else FinishReason.STOP


@dataclass(frozen=True, slots=True)
class ServerAcceptance:
    """What a server did with its drafts, in this program's definitions.

    drafted, accepted: numbers of draft tokens. rounds: verify passes with drafts, None if the server does not count
    them. by_position: (accepted, verified) for each draft position, as in Generation.accepted_by_position; empty if the
    server does not say. valid: whether the figures belong to this request alone. note: why they are not valid, or in
    which respect they cannot be compared with this program's own. forwards: forward passes of the target for the
    answer, the prefill included; None if unknown.
    """

    drafted: int
    accepted: int
    rounds: int | None = None
    by_position: tuple[tuple[int, int], ...] = ()
    valid: bool = True
    note: str = ""
    forwards: int | None = None

    def tokens_per_forward(self, tokens: int | None) -> float | None:
        """New tokens per forward pass of the target, as in Generation.tokens_per_target_forward."""
        return tokens / self.forwards if tokens and self.forwards else None
