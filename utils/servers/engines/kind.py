"""The contract of an engine kind: how a server is recognised, asked and read, and where its acceptance figures are.

The client speaks HTTP and measures times. Whatever differs between engines is behind this protocol.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from utils.servers.completion import Event, Piece, ServerCompletion
from utils.servers.request import Chat, ServerRequest

Counters = Mapping[str, float]  # an engine's own figures at one moment, by their names


@dataclass(frozen=True, slots=True)
class EngineAcceptance:
    """What a server did with its drafts, in this program's definitions.

    drafted, accepted: numbers of draft tokens. rounds: verify passes with drafts, None if the engine does not count
    them. by_position: (accepted, verified) for each draft position, as in Generation.accepted_by_position; empty if the
    engine does not say. valid: whether the figures belong to this request alone. note: why they are not valid, or in
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

    @property
    def rate(self) -> float | None:
        """Accepted drafts per draft, or None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def tokens_per_forward(self, tokens: int | None) -> float | None:
        """New tokens per forward pass of the target, as in Generation.tokens_per_target_forward."""
        return tokens / self.forwards if tokens and self.forwards else None


class ServerReader(Protocol):
    """Requests for pages of one server; paths begin with a slash and are below its root.

    All methods return None if the server has no such path or answers with something else, and raise UserError if it
    cannot be reached. post_json: sends a JSON body.
    """

    def get_json(self, path: str) -> Any: ...

    def get_text(self, path: str) -> str | None: ...

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any: ...


class EngineKind(Protocol):
    """One kind of engine. It keeps no state: everything about a request is in the arguments."""

    @property
    def name(self) -> str:
        """As /server list shows it."""

    @property
    def takes_token_ids(self) -> bool:
        """Whether a prompt can be a list of token ids."""

    def recognises(self, server: ServerReader) -> bool:
        """Whether the server is of this kind, from paths that only this kind has."""

    def tokens(self, server: ServerReader, text: str | Chat, *, special: bool = False) -> tuple[int, ...] | None:
        """The ids that the server's tokenizer gives for a text, or for the messages of a chat in the server's template;
        None if unknown. special: with the special tokens that the engine puts around a text.

        A prompt is sent as token ids only if the local tokenizer gives the same.
        """

    def path(self, request: ServerRequest) -> str:
        """The path of the request below the server's root, such as /v1/completions."""

    def body(self, request: ServerRequest, model: str) -> dict[str, Any]:
        """The JSON body of the request. Raises UserError for what the engine does not support."""

    def read(self, event: Event) -> Piece:
        """What one event adds to the answer. May raise LookupError, TypeError, ValueError or AttributeError for an
        event of another shape; the client turns these into one sentence.
        """

    def counters(self, server: ServerReader) -> Counters:
        """The engine's figures now, read before and after a request. Empty if it has none."""

    def acceptance(self, completion: ServerCompletion, before: Counters, after: Counters) -> EngineAcceptance | None:
        """What happened to the drafts of a request, or None if nothing was drafted or nothing is known."""
