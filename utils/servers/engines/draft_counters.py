"""From an engine's counters before and after a request to what happened to the drafts of that request.

vLLM and llama.cpp publish the same counters: drafts (verify passes), drafted and accepted tokens, and accepted tokens
by position. They belong to the whole server. They are valid for a request if the server generated no other tokens
between the two readings.
"""

from collections.abc import Mapping, Sequence

from utils.servers.completion import ServerCompletion
from utils.servers.engines.kind import Counters
from utils.text import count_of

PASSES, DRAFTED, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
ODD_FIGURES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # what figures of no sense raise
DRAFT_COUNTERS = (PASSES, DRAFTED, ACCEPTED, BY_POSITION)
SHORT_DRAFTS = "a position counts as verified if the one before it was accepted, even where the draft ended there"


def growth(before: Counters, after: Counters) -> dict[str, int] | None:
    """How much each counter grew, or None if one is missing or went back, as after a restart of the server."""
    grown = {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
    lost = any(name not in after for name in before)
    return None if lost or not before or any(count < 0 for count in grown.values()) else grown


def own_tokens(completion: ServerCompletion) -> int | None:
    """The number of new tokens in the server's own count."""
    return completion.token_count if completion.usage_tokens is None else completion.usage_tokens


def not_alone(completion: ServerCompletion, generated: int | None) -> str:
    """Why counters cannot be this request's own, or "" if the server generated its tokens and no others.

    generated: how many tokens the server counted between the two readings.
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
    """Number of accepted drafts at each position, as far as the counters name positions without a gap."""
    counts: list[int] = []
    while (name := f"{BY_POSITION}/{len(counts)}") in grown:
        counts.append(grown[name])
    return counts


def positions(accepted: Sequence[int], passes: int) -> tuple[tuple[int, int], ...]:
    """(accepted, verified) for each draft position that was verified.

    accepted: at each position. passes: verify passes with drafts. Exact if all drafts had the same length.
    """
    pairs = zip(accepted, [passes, *accepted], strict=False)
    return tuple((count, verified) for count, verified in pairs if verified)


def same_length(drafted: int, passes: int, longest: int) -> bool:
    """Whether every draft had the maximum length, so that `positions` is exact."""
    return drafted == passes * longest


def accepted_from_histogram(histogram: Sequence[int]) -> list[int]:
    """Number of accepted drafts at each position from a histogram: entry j is the number of verify passes that
    accepted exactly j drafts.
    """
    return [sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)]
