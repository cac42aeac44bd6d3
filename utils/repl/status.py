"""What is loaded and how it is computed, for /show and the toolbar; and what of the settings a pair allows."""

from typing import Any

from utils.bounds import LOADED
from utils.comparison.harness import Last
from utils.config.settings import Settings, setting_fields, shown
from utils.config.value_types import Limits
from utils.decode.model_session import context_length, vocabulary_size
from utils.pairs.weights import drafter_weights, target_weights

FREE_KINDS = (LOADED, "lookup", "suffix", "chain")  # drafters that come with no model, or with any


def facts_of(pair: Any) -> tuple[tuple[str, str], ...]:
    """(name, value) of what there is to know about a pair."""
    bound = context_length(pair.target)
    return (
        ("target model", pair.target_name),
        ("drafter model", f"{pair.drafter_name} ({pair.drafter_kind})" if pair.drafter is not None else "none"),
        (
            "device",
            pair.device
            if pair.drafter_device in (None, pair.device)
            else f"{pair.device}, drafter: {pair.drafter_device}",
        ),
        ("target weights", target_weights(pair)),
        ("drafter weights", drafter_weights(pair)),
        ("engine now", pair.engine.state.sentence()),
        ("context", f"{bound} tokens" if bound is not None else "no bound of its own"),
        ("vocabulary", f"{vocabulary_size(pair.target)} ids"),
    )


def status_of(pair: Any, settings: Settings, last: Last | None, turns: int = 0) -> str:
    """The pair, what matters most of the settings, the engine, how many turns were said and the last speeds, in one line."""
    told = [
        f"{name} {shown(settings, entry)}"
        for name, entry in setting_fields().items()
        if name in ("gamma", "processor", "verify")
    ]
    runs = [(strategy.name, run.tokens_per_second) for strategy, run, _ in last.compared] if last else []
    speeds = ", ".join(f"{name} {speed:.1f}" for name, speed in runs if speed)
    said = f"turn {turns}" if turns and settings.keeps_turns else ""
    parts = [f"{pair.target_name} + {pair.drafter_name or 'no drafter'}", *told, pair.engine.state.kind, said]
    parts.append(speeds and f"tokens/s: {speeds}")
    return " | ".join(filter(None, parts))


def limits_of(pair: Any) -> Limits:
    """What a pair allows."""
    return Limits(context_length(pair.target) or Limits().context, vocabulary_size(pair.target))


def drafters_left(words: tuple[str, ...], pair: Any) -> tuple[str, ...]:
    """Those of the words of /drafter_kind that a new pair has; a cut of the old target is none."""
    left = (word for word in words if word in FREE_KINDS or (word in ("model", "head") and word == pair.drafter_kind))
    return tuple(left) or (LOADED,)
