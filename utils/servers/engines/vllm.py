"""vLLM: token ids both ways, salted prefix caching, and draft counts per request or from Prometheus counters.

Read in vLLM 0.32: v1/spec_decode/metrics.py, v1/core/sched/scheduler.py, entrypoints/openai/completion. A draft token
is counted when it is verified; the bonus token is not. Drafts are not shortened to the rest of the answer, and those
after its end are counted as drafted and as accepted.
"""

from typing import Any
from uuid import uuid4

from utils.errors import UserError
from utils.servers.completion import ServerCompletion
from utils.servers.engines.draft_counters import (
    ACCEPTED,
    DRAFT_COUNTERS,
    DRAFTED,
    ODD_FIGURES,
    PASSES,
    SHORT_DRAFTS,
    accepted_at,
    accepted_from_histogram,
    growth,
    not_alone,
    own_tokens,
    positions,
    same_length,
)
from utils.servers.engines.kind import Counters, EngineAcceptance, ServerReader
from utils.servers.engines.metrics_page import metric_values
from utils.servers.engines.openai import TokenIdKind, owner_of
from utils.servers.request import ServerRequest

GENERATED = "generation_tokens"
PAST_THE_END = "vLLM also counts drafts after the end of the answer"


class VllmKind(TokenIdKind):
    """`vllm serve`. With --per-request-spec-decode-metrics the counts come with the answer, otherwise from /metrics."""

    @property
    def name(self) -> str:
        return "vllm"

    def recognises(self, server: ServerReader) -> bool:
        return owner_of(server) == "vllm"

    def engine_fields(self, request: ServerRequest) -> dict[str, Any]:
        """All sampling fields are given, because the defaults are from the model's generation_config.json."""
        fields: dict[str, Any] = {
            "top_k": request.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": request.ignore_eos,
            "return_token_ids": True,
        }
        if request.top_logprobs:
            fields["return_tokens_as_token_ids"] = True  # two tokens can have the same text
        # Blocks of the prefix cache are shared only between requests with the same salt.
        return fields if request.reuses_prefix else fields | {"cache_salt": uuid4().hex}

    def counters(self, server: ServerReader) -> Counters:
        try:
            page = server.get_text("/metrics") or ""
        except UserError:  # the page may be closed to clients; completions report a server that is gone
            return {}
        return metric_values(page, "vllm:", (*DRAFT_COUNTERS, GENERATED))

    def acceptance(self, completion: ServerCompletion, before: Counters, after: Counters) -> EngineAcceptance | None:
        metrics = completion.field("metrics")
        own = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        try:
            return _from_answer(completion, own) if own else _from_counters(completion, before, after)
        except ODD_FIGURES:
            return None


def _from_answer(completion: ServerCompletion, own: dict[str, Any]) -> EngineAcceptance | None:
    """The counts of `metrics.speculative_decoding`, at the level `summary` or `detailed`."""
    drafted, accepted, passes = (
        own[name] for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
    )
    if not drafted:
        return None
    note = PAST_THE_END
    if steps := list(zip(own.get("per_step_drafted") or (), own.get("per_step_accepted") or (), strict=True)):
        by_position = tuple(
            (
                sum(step_accepted > position for _, step_accepted in steps),
                sum(step_drafted > position and step_accepted >= position for step_drafted, step_accepted in steps),
            )
            for position in range(max(step_drafted for step_drafted, _ in steps))
        )
    else:
        counts = accepted_from_histogram(own["acceptance_histogram"])
        by_position = positions(counts, passes)
        note += "" if same_length(drafted, passes, len(counts)) else f"; {SHORT_DRAFTS}"
    return EngineAcceptance(
        drafted, accepted, passes, by_position, note=note, forwards=_forwards(completion, accepted, passes)
    )


def _from_counters(completion: ServerCompletion, before: Counters, after: Counters) -> EngineAcceptance | None:
    grown = growth(before, after)
    if grown is None or not grown.get(DRAFTED):
        return None
    drafted, accepted, passes = grown[DRAFTED], grown.get(ACCEPTED, 0), grown.get(PASSES, 0)
    if reason := not_alone(completion, grown.get(GENERATED)):
        return EngineAcceptance(drafted, accepted, passes, valid=False, note=reason)
    counts = accepted_at(grown)
    note = PAST_THE_END if same_length(drafted, passes, len(counts)) else f"{PAST_THE_END}; {SHORT_DRAFTS}"
    forwards = _forwards(completion, accepted, passes)
    return EngineAcceptance(drafted, accepted, passes, positions(counts, passes), note=note, forwards=forwards)


def _forwards(completion: ServerCompletion, accepted: int, passes: int) -> int | None:
    """Forward passes of the target: the prefill, the verify passes, and decode steps without drafts.

    The latter are what remains of the tokens. It is too few by at most the number of accepted drafts after the end.
    """
    tokens = own_tokens(completion)
    return None if tokens is None else 1 + passes + max(0, tokens - 1 - passes - accepted)
