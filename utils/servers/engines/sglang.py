"""SGLang: token ids both ways, and draft counts in `sglext.spec_tokens_details`, or from Prometheus counters.

Never run against a real SGLang. Read in SGLang 0.5.23: managers/tokenizer_manager.py, entrypoints/openai and
observability/metrics_collector.py. Every decode step verifies a draft, and every draft counts with all slots that it
has: of a tree its nodes, of prompt lookup also those that found nothing.
"""

from typing import Any
from uuid import uuid4

from utils.errors import UserError
from utils.servers.completion import ServerCompletion
from utils.servers.engines.draft_counters import (
    ODD_FIGURES,
    accepted_from_histogram,
    growth,
    not_alone,
    own_tokens,
    positions,
)
from utils.servers.engines.kind import Counters, EngineAcceptance, ServerReader
from utils.servers.engines.metrics_page import metric_values
from utils.servers.engines.openai import TokenIdKind, owner_of
from utils.servers.request import ServerRequest

GENERATED, PASSES, SLOTS = "generation_tokens", "spec_verify_calls", "spec_num_draft_tokens"
ALL_SLOTS = "SGLang counts every draft slot of a verify pass as drafted, also nodes of a tree and unused slots"
DERIVED = "accepted drafts are derived from the number of tokens and verify passes"


class SglangKind(TokenIdKind):
    """`sglang.launch_server`. The counters need its option --enable-metrics."""

    @property
    def name(self) -> str:
        return "sglang"

    def recognises(self, server: ServerReader) -> bool:
        return owner_of(server) == "sglang"

    def engine_fields(self, request: ServerRequest) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "top_k": request.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": request.ignore_eos,
            "return_token_ids": True,
            "return_spec_tokens_details": True,
        }
        return fields if request.reuses_prefix else fields | {"cache_salt": uuid4().hex}

    def counters(self, server: ServerReader) -> Counters:
        try:
            page = server.get_text("/metrics") or ""
        except UserError:  # completions report a server that is gone
            return {}
        return metric_values(page, "sglang:", (GENERATED, PASSES, SLOTS))

    def acceptance(self, completion: ServerCompletion, before: Counters, after: Counters) -> EngineAcceptance | None:
        extension = completion.field("sglext")
        details = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
        try:
            return _from_answer(details) if details else _from_counters(completion, before, after)
        except ODD_FIGURES:
            return None


def _from_answer(details: dict[str, Any]) -> EngineAcceptance | None:
    """The canonical fields. An answer counts one pass for its prefill."""
    drafted, accepted, passes = (
        details[name] for name in ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct")
    )
    if not drafted or not passes:
        return None
    slots = drafted // passes
    counts = accepted_from_histogram(details.get("spec_correct_drafts_histogram") or ())
    counts += [0] * (slots - len(counts)) if counts else []
    return EngineAcceptance(drafted, accepted, passes, positions(counts, passes), note=ALL_SLOTS, forwards=passes + 1)


def _from_counters(completion: ServerCompletion, before: Counters, after: Counters) -> EngineAcceptance | None:
    """From the number of verify passes: each yields one token more than it accepts."""
    slots = round(after.get(SLOTS, 0))
    grown = growth({**before, SLOTS: 0}, {**after, SLOTS: 0}) if before else None
    if grown is None or slots < 2 or not grown.get(PASSES):
        return None
    passes, tokens = grown[PASSES], own_tokens(completion)
    drafted = passes * (slots - 1)
    accepted = max(0, (tokens or 0) - 1 - passes)
    if reason := not_alone(completion, grown.get(GENERATED)):
        return EngineAcceptance(drafted, accepted, passes, valid=False, note=reason)
    return EngineAcceptance(drafted, accepted, passes, note=f"{ALL_SLOTS}; {DERIVED}", forwards=passes + 1)
