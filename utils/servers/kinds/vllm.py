"""vLLM, and SGLang, whose requests are the same: token ids both ways, salted prefix caching, and counts of drafts.

From the sources of vLLM 0.32 (v1/spec_decode/metrics.py, v1/core/sched/scheduler.py) and SGLang 0.5.23, which was never
run. A draft token is counted when it is verified. vLLM also counts the drafts after the end of an answer.
"""

from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import uuid4

from utils.decode.steps import by_position
from utils.servers.kinds.completion import MAX_DRAFT, Chat, Counters, ServerAcceptance, ServerCompletion, ServerRequest
from utils.servers.kinds.server_kind import (
    ACCEPTED,
    DRAFTED,
    PASSES,
    ServerKind,
    ServerReader,
    accepted_at,
    accepted_from_histogram,
    growth,
    not_alone,
    own_tokens,
    positions,
    tokenized,
)

GENERATED = "generation_tokens"
ALL_SLOTS = "SGLang counts every draft slot of a verify pass as drafted, also nodes of a tree and unused slots"


class VllmKind(ServerKind):
    """`vllm serve`. With --per-request-spec-decode-metrics, the answer has the counts; otherwise they come from
    /metrics.
    """

    name: ClassVar[str] = "vllm"
    owner: ClassVar[str] = "vllm"
    takes_token_ids: ClassVar[bool] = True
    generated: ClassVar[str] = GENERATED
    prefix: ClassVar[str] = "vllm:"
    figures: ClassVar[tuple[str, ...]] = ("metrics",)
    setup_page: ClassVar[str] = "/server_info?config_format=json"  # only with VLLM_SERVER_DEV_MODE=1

    def tokens(self, server: ServerReader, text: str | Chat, *, special: bool = False) -> tuple[int, ...] | None:
        if isinstance(text, str):
            return tokenized(server, {"prompt": text, "add_special_tokens": special})
        messages = [dict(message) for message in text.messages]
        return tokenized(server, {"messages": messages, "add_generation_prompt": True})

    def further_fields(self, request: ServerRequest) -> dict[str, Any]:
        """All sampling fields are sent, because the defaults are from the model's generation_config.json."""
        fields: dict[str, Any] = {
            "top_k": request.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": request.ignore_eos,
            "return_token_ids": True,
        }
        # Only requests with the same salt share blocks of the prefix cache.
        return fields if request.reuses_prefix else fields | {"cache_salt": uuid4().hex}

    def token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        ids = choice.get("token_ids")
        return None if ids is None else tuple(ids)

    def drafts(self, completion: ServerCompletion, before: Counters, after: Counters) -> ServerAcceptance | None:
        metrics = completion.figures.get("metrics")
        own = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        return _from_answer(completion, own) if own else _from_counters(completion, before, after)


def _from_answer(completion: ServerCompletion, own: dict[str, Any]) -> ServerAcceptance | None:
    """The counts of `metrics.speculative_decoding`, at the level `summary` or `detailed`."""
    drafted, accepted, passes = (
        own[name] for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
    )
    if not drafted:
        return None
    note = ""
    if steps := list(zip(own.get("per_step_drafted") or (), own.get("per_step_accepted") or (), strict=True)):
        pairs = tuple(by_position([(min(count, MAX_DRAFT), step_accepted) for count, step_accepted in steps]))
    else:
        pairs, note = positions(drafted, accepted_from_histogram(own["acceptance_histogram"]), passes)
    return _acceptance(completion, (drafted, accepted, passes), pairs, note)


def _from_counters(completion: ServerCompletion, before: Counters, after: Counters) -> ServerAcceptance | None:
    grown = growth(before, after)
    if grown is None or not grown.get(DRAFTED):
        return None
    drafted, accepted, passes = grown[DRAFTED], grown.get(ACCEPTED, 0), grown.get(PASSES, 0)
    if reason := not_alone(completion, grown.get(GENERATED)):
        return ServerAcceptance(drafted, accepted, passes, valid=False, note=reason)
    return _acceptance(completion, (drafted, accepted, passes), *positions(drafted, accepted_at(grown), passes))


def _acceptance(
    completion: ServerCompletion, counts: tuple[int, int, int], by_position: tuple[tuple[int, int], ...], note: str
) -> ServerAcceptance:
    """The drafts with the target's forward passes: the prefill, the verify passes, and decode steps without drafts.

    The decode steps are the remaining tokens. The result is too low by at most the accepted drafts after the end.
    """
    (_, accepted, passes), tokens = counts, own_tokens(completion)
    forwards = None if tokens is None else 1 + passes + max(0, tokens - 1 - passes - accepted)
    note = "; ".join(filter(None, ("vLLM also counts drafts after the end of the answer", note)))
    return ServerAcceptance(*counts, by_position, note=note, forwards=forwards)


class SglangKind(VllmKind):
    """`sglang.launch_server`. The answer has the draft figures, in `sglext.spec_tokens_details`."""

    name: ClassVar[str] = "sglang"
    owner: ClassVar[str] = "sglang"
    generated: ClassVar[str] = ""
    figures: ClassVar[tuple[str, ...]] = ("sglext",)
    setup_page: ClassVar[str] = "/server_info"

    def further_fields(self, request: ServerRequest) -> dict[str, Any]:
        return super().further_fields(request) | {"return_spec_tokens_details": True}

    def drafts(self, completion: ServerCompletion, before: Counters, after: Counters) -> ServerAcceptance | None:
        """Every decode step verifies a draft, and the prefill of an answer counts as one more pass."""
        details = completion.figures["sglext"]["spec_tokens_details"]
        drafted, accepted = details["spec_num_proposed_drafts"], details["spec_num_correct_drafts"]
        passes = details["spec_verify_ct"]
        if not drafted or not passes:
            return None
        counts = accepted_from_histogram(details.get("spec_correct_drafts_histogram") or ())
        counts += [0] * (min(drafted // passes, MAX_DRAFT) - len(counts)) if counts else []
        by_position, _ = positions(drafted, counts, passes)
        return ServerAcceptance(drafted, accepted, passes, by_position, note=ALL_SLOTS, forwards=passes + 1)
