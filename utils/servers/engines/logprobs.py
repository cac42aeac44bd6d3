"""The log-probabilities of an answer, in whichever of three forms a server writes them.

OpenAI's completions and chats have one form each; llama.cpp's /completion has its own, with token ids.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.servers.completion import Event, ServerCompletion

Token = int | str  # its id where the server gives it, otherwise its text
AS_ID = "token_id:"  # how vLLM writes an id in the place of a text


@dataclass(frozen=True, slots=True)
class Position:
    """One position of an answer: the token there, its log-probability, and the highest candidates, the best first.

    top is empty where the engine computed none, as llama.cpp does for drafts that were accepted.
    """

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...] = ()

    def of(self, token: Token) -> float | None:
        """The log-probability of a token, or None if it is not among the candidates."""
        return next((logprob for candidate, logprob in self.top if candidate == token), None)


def logprob_positions(completion: ServerCompletion) -> tuple[Position, ...]:
    """The positions of an answer, empty if it has no log-probabilities or if they have another form."""
    try:
        return tuple(position for event in completion.events for position in _of_event(event))
    except (LookupError, TypeError, ValueError, AttributeError):
        return ()


def _of_event(event: Event) -> Iterator[Position]:
    yield from _objects(event.get("completion_probabilities") or ())
    for choice in (event.get("choices") or ())[:1]:
        found = choice.get("logprobs") or {}
        if found.get("content"):
            yield from _objects(found["content"])
        elif found.get("tokens"):
            yield from _columns(found)


def _objects(entries: Sequence[Mapping[str, Any]]) -> Iterator[Position]:
    """One object for each position, as in chats and in llama.cpp."""
    for entry in entries:
        top = [(_token(other), float(other["logprob"])) for other in entry.get("top_logprobs") or ()]
        yield Position(_token(entry), float(entry["logprob"]), _sorted(top))


def _columns(found: Mapping[str, Any]) -> Iterator[Position]:
    """One list for each field, as in completions."""
    tops = found.get("top_logprobs") or [None] * len(found["tokens"])
    for text, logprob, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True):
        candidates = [(_named(other), float(value)) for other, value in (top or {}).items()]
        yield Position(_named(text), float(logprob), _sorted(candidates))


def _token(entry: Mapping[str, Any]) -> Token:
    return int(entry["id"]) if "id" in entry else _named(entry["token"])


def _named(text: str) -> Token:
    return int(text.removeprefix(AS_ID)) if text.startswith(AS_ID) else text


def _sorted(top: list[tuple[Token, float]]) -> tuple[tuple[Token, float], ...]:
    return tuple(sorted(top, key=lambda candidate: -candidate[1]))
