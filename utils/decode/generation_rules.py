"""What a model's generation settings forbid or force by token and place alone: part of the model's law, so that every strategy sees it.

Translation models forbid their padding, summarizers begin with a fixed token. What depends on the text so far, or on a wanted length, is
not applied; `ignored_settings` names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# What `generate` would obey in greedy decoding too, and the value by which it does nothing.
IGNORED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
}


@dataclass(frozen=True, slots=True)
class TokenRules:
    """never: ids that have no probability. at_first: further ids that the first free token may not be. forced: the first token."""

    never: tuple[int, ...] = ()
    at_first: tuple[int, ...] = ()
    forced: int | None = None

    @classmethod
    def of(cls, model: Any) -> TokenRules:
        """The rules of a model's generation settings."""
        settings, known = (
            getattr(model, "generation_config", None),
            model.config.get_text_config(decoder=True).vocab_size,
        )
        alone = [words[0] for words in getattr(settings, "bad_words_ids", None) or () if len(words) == 1]
        never = {*(getattr(settings, "suppress_tokens", None) or ()), *(set(alone) - _ends(settings))}
        begins = getattr(settings, "begin_suppress_tokens", None) or ()
        forced = getattr(settings, "forced_bos_token_id", None) if model.config.is_encoder_decoder else None
        # Of another vocabulary's tokens there is nothing to forbid.
        return cls(_within(sorted(never), known), _within(begins, known), next(iter(_within([forced], known)), None))

    def __call__(self, logits: Tensor, place: int) -> Tensor:
        """Logits (B, k, V), the first of the k rows being that of the run's new token number `place`, counted from 0."""
        free = (0 if self.forced is None else 1) - place  # row of the first token that is free
        forces, begins = self.forced is not None and place == 0, self.at_first and 0 <= free < logits.shape[1]
        if not (self.never or forces or begins):
            return logits
        logits = logits.clone()  # processors and drafters are promised that nobody writes into what a model returned
        logits[..., list(self.never)] = -torch.inf
        if begins:
            logits[:, free, list(self.at_first)] = -torch.inf
        if forces:
            logits[:, 0] = -torch.inf
            logits[:, 0, self.forced] = 0
        return logits


def _within(ids: Iterable[Any], known: int) -> tuple[int, ...]:
    return tuple(token for token in ids if isinstance(token, int) and 0 <= token < known)


def ignored_settings(model: Any, name: str) -> tuple[str, ...]:
    """A note naming the generation settings that no strategy obeys, if there are any."""
    settings = getattr(model, "generation_config", None)
    found = {field: getattr(settings, field, None) for field in IGNORED}
    words = [f"{field} {value}" for field, value in found.items() if value is not None and value != IGNORED[field]]
    if any(len(several) > 1 for several in getattr(settings, "bad_words_ids", None) or ()):
        words.append("bad_words_ids of several tokens")
    return (
        (f"{name} asks for {', '.join(words)}: not applied, strategies go by the model and the processor alone",)
        if words
        else ()
    )


def _ends(settings: Any) -> set[int]:
    ends = getattr(settings, "eos_token_id", None)
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])
