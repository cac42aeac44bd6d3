"""One completion of a server: the request, the arrival times, and what happened to the drafts.

Stream chunks are not tokens: a server may put several tokens into one. Tokens are counted by their ids or by the
server's own usage figures, never by chunks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from utils.decode.steps import FinishReason

Event = Mapping[str, Any]  # the JSON object of one stream chunk
Counters = Mapping[str, float]  # a server's own figures at one moment, by name
IDS, USAGE, UNCOUNTED = "token ids", "usage", "unknown"  # how tokens are counted
MAX_COUNT = 2**31 - 1  # of tokens of any kind
MAX_DRAFT = 1024  # drafts of a pass, which may be counted after the end of an answer


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt as messages with a role and a content, which the server puts into its own chat template. `further` are
    fields of the body, such as tools.
    """

    messages: tuple[Mapping[str, Any], ...]
    further: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One streamed completion in the terms of this program. Server kinds translate it for their servers.

    A `temperature` of 0 is greedy, and a `top_k` of 0 means no limit. With `reuses_prefix`, the server may reuse the
    computation of an earlier request. `vocabulary` is the number of token ids, as far as it is known.
    """

    prompt: str | tuple[int, ...] | Chat
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    reuses_prefix: bool = False
    vocabulary: int = 1 << 24

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, Chat)


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event, as parsed by a server kind.

    `token_ids` is None if the server returns no ids. `finish_reason` is the server's word, empty until the last piece.
    `prompt_tokens` and `new_tokens` are usage figures of the whole request.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str = ""
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """One finished or interrupted answer.

    `text` never contains the server's key; `pieces` may. `seconds` is the time from the request to the end of the
    stream. `figures` are fields of the server kind, and `own_rate` is its decode speed by its own clock. A Connection
    adds the rest. `other_tokens` were generated for other requests meanwhile. What is unknown is None.
    """

    text: str
    pieces: tuple[Piece, ...]
    finish: FinishReason
    finish_reason: str
    seconds: float
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    own_rate: float | None = None
    request: ServerRequest | None = None
    acceptance: "ServerAcceptance | None" = None
    other_tokens: int | None = None
    kind: str = ""
    model: str = ""

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """The ids of all new tokens, or None if the server does not return them for the whole text."""
        if not any(piece.token_ids for piece in self.pieces):
            return None
        if any(piece.text and piece.token_ids is None for piece in self.pieces):
            return None
        ids = tuple(token for piece in self.pieces for token in piece.token_ids or ())
        # llama.cpp leaves out ids of characters that several tokens make up.
        return ids if self.usage_tokens in (None, len(ids)) else None

    @property
    def token_count(self) -> int | None:
        ids = self.token_ids
        return self.usage_tokens if ids is None else len(ids)

    @property
    def counted_by(self) -> str:
        return UNCOUNTED if self.token_count is None else USAGE if self.token_ids is None else IDS

    @property
    def first_seconds(self) -> float | None:
        return self.pieces[0].seconds if self.pieces else None

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from the first piece with content to the last one."""
        return self.pieces[-1].seconds - self.pieces[0].seconds if self.pieces else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first piece per second after it, or None without such tokens.

        If ids are unknown, the first piece may have several tokens: then the server's own clock decides, if it has one,
        and otherwise the piece counts as one token.
        """
        if self.token_ids is None and self.own_rate is not None:
            return self.own_rate
        count, seconds = self.token_count, self.decode_seconds
        if count is None or not seconds:
            return None
        later = count - (len(self.pieces[0].token_ids or ()) if self.token_ids is not None else 1)
        return later / seconds if later > 0 else None


def believed(count: Any, most: int = MAX_COUNT) -> int | None:
    """A server's number, or None unless it is a whole number from 0 to `most`."""
    return count if type(count) is int and 0 <= count <= most else None


@dataclass(frozen=True, slots=True)
class ServerAcceptance:
    """What happened to a server's drafts, in this program's definitions.

    `rounds` counts verify passes with drafts, and `forwards` forward passes of the target with the prefill; None is
    unknown. `by_position` is as Generation.accepted_by_position, and empty if it is unknown. If not `valid`, the
    figures do not belong to this request alone. `note` explains that, or a difference to this program's own figures.
    """

    drafted: int
    accepted: int
    rounds: int | None = None
    by_position: tuple[tuple[int, int], ...] = ()
    valid: bool = True
    note: str = ""
    forwards: int | None = None

    def is_possible(self, tokens: int | None) -> bool:
        """Whether these are numbers that an answer of so many tokens can have."""
        counts = (self.drafted, self.accepted, self.rounds or 0, self.forwards or 0, *chain(*self.by_position))
        if len(self.by_position) > MAX_DRAFT or any(believed(count) is None for count in counts):
            return False
        most = self.drafted if tokens is None or not self.valid else min(self.drafted, tokens + MAX_DRAFT)
        return self.accepted <= most
