"""The contract of a server kind, a generic kind with OpenAI's protocol only, and helpers for several kinds.

The client speaks HTTP and measures times. Everything that differs between server programs is here: the other kinds
inherit from this one. https://platform.openai.com/docs/api-reference/completions
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, islice
from math import isfinite
from typing import Any, ClassVar, Protocol

from utils.errors import UserError
from utils.servers.kinds.completion import (
    Chat,
    Counters,
    Event,
    Piece,
    ServerAcceptance,
    ServerCompletion,
    ServerRequest,
    believed,
)
from utils.text import count_of, visible

PASSES, DRAFTED, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
DRAFT_COUNTERS = (PASSES, DRAFTED, ACCEPTED, BY_POSITION)
ODD_FIGURES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # of figures in an unknown form
SHORT_DRAFTS = "a position counts as verified if the one before it was accepted, even where the draft ended there"
# A line of Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.ASCII | re.MULTILINE)
POSITION = re.compile(r'(?:^|,)\s*position="(\d{1,4})"', re.ASCII)
# What servers report about their drafts, by its names in pages and start arguments of vLLM, SGLang and llama.cpp.
SETUP = {
    "method": ("speculative_config.method", "speculative_algorithm", "spec_type"),
    "drafter": (
        *("speculative_config.model", "speculative_draft_model_path", "spec_draft_model", "model_draft"),
        *("speculative.model", "speculative_config.draft_model_config.model"),
    ),
    "drafts a round": (
        *("num_speculative_tokens", "speculative_num_steps", "speculative.n_max", "spec_draft_n_max"),
        *("spec_ngram_simple_size_m", "speculative_num_draft_tokens"),
    ),
    "choice of drafts": ("draft_sample_method", "speculative_eagle_topk", "speculative.p_min", "spec_draft_p_min"),
    "verification": ("rejection_sample_method", "acceptance_method"),
    "quantization": ("model_config.quantization", "quantization", "model_ftype", "dtype"),
}
MOST_FIELDS, LONGEST_FACT = 5000, 80  # of a page, and characters


class ServerError(UserError):
    """A failed request. `status` is the HTTP status of an answer with an error, otherwise None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerReader(Protocol):
    """Requests for pages of one server. Paths begin with a slash and are below its root.

    Methods return None if the server has no such path or its answer has another form. They raise ServerError if it
    cannot be reached. `get_json` sends a JSON body if there is one.
    """

    def get_json(self, path: str, body: Mapping[str, Any] | None = None) -> Any: ...

    def get_text(self, path: str) -> str | None: ...


class ServerKind:
    """Text prompts and chats, tokens counted by usage, and no drafts. A kind has no state.

    `name` is its name in records, and `owner` that of its models in /v1/models, or empty. `takes_token_ids` is True if
    a prompt can be a list of token ids. `figures` are the names of the fields of events with figures beyond OpenAI's
    protocol. `generated` is the counter of all new tokens, or empty without counters, and `prefix` begins the names of
    counters. `setup_page` says how the server was started, if it has such a page.
    """

    name: ClassVar[str] = "openai"
    owner: ClassVar[str] = ""
    takes_token_ids: ClassVar[bool] = False
    figures: ClassVar[tuple[str, ...]] = ()
    generated: ClassVar[str] = ""
    prefix: ClassVar[str] = ""
    setup_page: ClassVar[str] = ""

    def tokens(self, server: ServerReader, text: str | Chat, *, special: bool = False) -> tuple[int, ...] | None:
        """The server's own token ids of a text, or of the messages of a chat in the server's template; None if unknown.

        With `special`, they include the special tokens that the server adds to a text. A prompt is sent as token ids
        only if the local tokenizer yields the same ids.
        """
        return None

    def path(self, request: ServerRequest) -> str:
        return "/v1/chat/completions" if request.is_chat else "/v1/completions"

    def body(self, request: ServerRequest, model: str) -> dict[str, Any]:
        """The JSON body of the request. Raises UserError for a setting that the server does not support."""
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
            body |= {"messages": [dict(message) for message in request.prompt.messages], **request.prompt.further}
        else:
            body["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        return body | self.further_fields(request)

    def further_fields(self, request: ServerRequest) -> dict[str, Any]:
        """Fields beyond OpenAI's protocol. Raises UserError for a setting that would need such a field."""
        if request.top_k:
            raise UserError(f"a server of the kind {self.name} has no top-k sampling; choose another /processor.")
        return {}

    def read(self, event: Event) -> Piece:
        """The choice 0 of an event, and its usage figures. Reasoning counts as text, because it is generated.

        May raise LookupError, TypeError, ValueError or AttributeError for an event of an unknown form; the client turns
        these into one sentence.
        """
        usage = usage if isinstance(usage := event.get("usage"), dict) else {}
        prompt_tokens, new_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        choice = next((choice for choice in event.get("choices") or () if not choice.get("index")), None)
        if choice is None:  # the last event has only the usage
            return Piece(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        if "delta" in choice:
            delta = choice["delta"] or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = reasoning + (delta.get("content") or "")
        else:
            text = choice.get("text") or ""
        return Piece(text, self.token_ids(choice), choice.get("finish_reason") or "", prompt_tokens, new_tokens)

    def token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        return None

    def own_rate(self, figures: Mapping[str, Any]) -> float | None:
        """Tokens after the first one per second, by the server's own clock, or None if unknown or impossible."""
        return None

    def counters(self, server: ServerReader) -> Counters:
        """The server's current counters of drafts and generated tokens in /metrics. Empty without such figures.

        They belong to the whole server. They are valid for a request if no other tokens were generated between the
        reading before it and the one after it.
        """
        if not self.generated:
            return {}
        try:
            page = server.get_text("/metrics") or ""
        except UserError:  # the page may be closed to clients; completions report a lost server
            return {}
        return metric_values(page, self.prefix, (*DRAFT_COUNTERS, self.generated))

    def setup(self, server: ServerReader) -> dict[str, str]:
        """What the server's own page says about drafts, by the names of SETUP. Empty without such a page."""
        try:
            return setup_facts(server.get_json(self.setup_page)) if self.setup_page else {}
        except UserError:  # closed to clients, as in `counters`
            return {}

    def acceptance(self, completion: ServerCompletion, before: Counters, after: Counters) -> ServerAcceptance | None:
        """The drafts of a request, or None if nothing was drafted or known, or if the figures cannot be true."""
        try:
            found = self.drafts(completion, before, after)
            return found if found is None or found.is_possible(completion.token_count) else None
        except ODD_FIGURES:
            return None

    def drafts(self, completion: ServerCompletion, before: Counters, after: Counters) -> ServerAcceptance | None:
        """As `acceptance`, as reported. May raise ODD_FIGURES."""
        return None

    def other_tokens(self, own: int | None, before: Counters, after: Counters) -> int | None:
        """Tokens that the server generated between two readings beyond these `own` ones, or None if unknown."""
        generated = believed((growth(before, after) or {}).get(self.generated))
        return None if own is None or generated is None else max(0, generated - own)


def tokenized(server: ServerReader, body: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The ids that a server's /tokenize returns, or None if there is no such page or its answer has another form."""
    found = server.get_json("/tokenize", body)
    ids = found.get("tokens") if isinstance(found, dict) else None
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        return None
    return tuple(ids)


def setup_facts(page: Any) -> dict[str, str]:
    """The values of a page, or of start arguments, by the names of SETUP. Values of other forms are left out."""
    fields: dict[str, str] = {}
    waiting: list[tuple[str, Any]] = [("", page)]
    while waiting and len(fields) < MOST_FIELDS:
        name, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}", part) for key, part in islice(value.items(), MOST_FIELDS)]
        elif isinstance(value, str | int | float) and value not in ("", None):
            fields[name] = visible(str(value))[:LONGEST_FACT]
    found = {
        fact: next((value for name in names for key, value in fields.items() if key.endswith(f".{name}")), "")
        for fact, names in SETUP.items()
    }
    return {fact: value for fact, value in found.items() if value}


def metric_values(page: str, prefix: str, names: Collection[str]) -> dict[str, float]:
    """The values of these metrics, without prefix and without the `_total` of counters.

    Samples of one metric are added up, because servers have one for each process. Only positions of drafts stay
    separate, as `name/0`, `name/1` and so on. Lines of any other form are skipped.
    """
    known = {f"{prefix}{name}{end}": name for name in names for end in ("", "_total")}
    values: dict[str, float] = {}
    for sample, labels, text in SAMPLE.findall(page):
        if (name := known.get(sample)) is None:
            continue
        if position := POSITION.search(labels):
            name = f"{name}/{int(position[1])}"
        with suppress(ValueError):
            values[name] = values.get(name, 0.0) + float(text)
    return values


def growth(before: Counters, after: Counters) -> dict[str, int] | None:
    """The growth of each counter, or None if one is missing, decreased as after a restart, or not finite."""
    if not all(map(isfinite, (*before.values(), *after.values()))):
        return None
    grown = {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
    lost = any(name not in after for name in before)
    return None if lost or not before or any(count < 0 for count in grown.values()) else grown


def own_tokens(completion: ServerCompletion) -> int | None:
    """The server's own count of new tokens."""
    return completion.token_count if completion.usage_tokens is None else completion.usage_tokens


def not_alone(completion: ServerCompletion, generated: int | None) -> str:
    """Why counters do not belong to this request alone. It is empty if only this request's tokens were generated.

    `generated` is the server's number of tokens between the two readings.
    """
    own = own_tokens(completion)
    if own is None or generated is None:
        return "it is unknown whether the server had other requests meanwhile"
    if generated > own:
        return f"the server had other requests meanwhile: {count_of(generated - own, 'token')} more were generated"
    if generated < own:
        return "the server's counters do not contain the whole answer"
    return ""


def accepted_at(grown: Mapping[str, int]) -> list[int]:
    """The accepted drafts at each position, as far as the counters have positions without a gap."""
    counts: list[int] = []
    while (name := f"{BY_POSITION}/{len(counts)}") in grown:
        counts.append(grown[name])
    return counts


def positions(drafted: int, accepted: Sequence[int], passes: int) -> tuple[tuple[tuple[int, int], ...], str]:
    """(accepted, verified) for each draft position that was verified, and a note if drafts differed in length.

    `accepted` has one number for each position, and `passes` counts verify passes with drafts.
    """
    pairs = zip(accepted, [passes, *accepted], strict=False)
    note = "" if drafted == passes * len(accepted) else SHORT_DRAFTS
    return tuple((count, verified) for count, verified in pairs if verified), note


def with_positions(found: ServerAcceptance, grown: Mapping[str, int]) -> ServerAcceptance:
    """The drafts with their passes and positions from counters, if these have grown by the same numbers."""
    same = (grown.get(DRAFTED), grown.get(ACCEPTED)) == (found.drafted, found.accepted)
    if found.by_position or not same or not (passes := grown.get(PASSES)):
        return found
    pairs, note = positions(found.drafted, accepted_at(grown), passes)
    return replace(found, rounds=passes, by_position=pairs, note=note or found.note)


def accepted_from_histogram(histogram: Sequence[int]) -> list[int]:
    """The accepted drafts at each position. Entry j of the histogram counts the verify passes that accepted exactly j
    drafts.
    """
    return list(accumulate(histogram[:0:-1]))[::-1]
