"""What is loaded and how it is computed, for /show."""

from typing import Any

from utils.caching import context_length, vocabulary_size
from utils.models.weights import drafter_weights, target_weights


def facts_of(pair: Any) -> tuple[tuple[str, str], ...]:
    """(name, value) of what there is to know about a pair."""
    bound = context_length(pair.target)
    return (
        ("target model", pair.target_name),
        ("drafter model", f"{pair.drafter_name} ({pair.drafter_kind})" if pair.drafter is not None else "none"),
        ("device", pair.device if pair.drafter_device in (None, pair.device) else f"{pair.device}, drafter: {pair.drafter_device}"),
        ("target weights", target_weights(pair)),
        ("drafter weights", drafter_weights(pair)),
        ("engine now", pair.engine.state.sentence()),
        ("context", f"{bound} tokens" if bound is not None else "no bound of its own"),
        ("vocabulary", f"{vocabulary_size(pair.target)} ids"),
    )
