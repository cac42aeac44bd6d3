"""What a model's generation settings forbid or force by token and position alone. Part of the model's distribution,
so every strategy obeys.

Translation models forbid their padding token, summarizers begin with a fixed token. Settings that depend on the text
so far, or on a wanted length, are not applied; `ignored_settings` names them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

# Settings that `generate` applies in greedy decoding too, and the value that switches each of them off.
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
class GenerationRules:
    """Rules about single tokens.

    never: ids with probability 0. at_first: further ids that the first free token may not be. forced: the first token.
    """

    never: tuple[int, ...] = ()
    at_first: tuple[int, ...] = ()
    forced: int | None = None

    @classmethod
    def of(cls, model: Any) -> Self:
        """The rules in a model's generation settings. Ids outside the vocabulary are dropped."""
        settings = getattr(model, "generation_config", None)
        size = model.config.get_text_config(decoder=True).vocab_size
        single = {words[0] for words in getattr(settings, "bad_words_ids", None) or () if len(words) == 1}
        # As in `generate`, bad_words_ids cannot forbid an end token.
        never = {*(getattr(settings, "suppress_tokens", None) or ()), *(single - _end_ids(settings))}
        begins = getattr(settings, "begin_suppress_tokens", None) or ()
        # `generate` forces it after exactly one token of context: the start token of an encoder-decoder.
        forced = getattr(settings, "forced_bos_token_id", None) if model.config.is_encoder_decoder else None
        return cls(_within(sorted(never), size), _within(begins, size), next(iter(_within([forced], size)), None))

    def __call__(self, logits: Tensor, first: int) -> Tensor:
        """Apply the rules to logits (B, k, V) whose first row predicts the run's new token number `first`, counted
        from 0.
        """
        free = (0 if self.forced is None else 1) - first  # row of the first token that is not forced
        is_forced = self.forced is not None and first == 0
        begins = bool(self.at_first) and 0 <= free < logits.shape[1]
        if not (self.never or is_forced or begins):
            return logits
        logits = logits.clone()  # processors and drafters rely on the model's own output not being written to
        logits[..., list(self.never)] = -torch.inf
        if begins:
            logits[:, free, list(self.at_first)] = -torch.inf
        # Last: the forced token wins over a rule that forbids it.
        if is_forced:
            logits[:, 0] = -torch.inf
            logits[:, 0, self.forced] = 0
        return logits


def _within(ids: Iterable[Any], size: int) -> tuple[int, ...]:
    return tuple(token for token in ids if isinstance(token, int) and 0 <= token < size)


def ignored_settings(model: Any, name: str) -> tuple[str, ...]:
    """A note that names the generation settings which no strategy applies, or an empty tuple."""
    settings = getattr(model, "generation_config", None)
    values = {field: getattr(settings, field, None) for field in IGNORED}
    ignored = [f"{field} {value}" for field, value in values.items() if value is not None and value != IGNORED[field]]
    if any(len(words) > 1 for words in getattr(settings, "bad_words_ids", None) or ()):
        ignored.append("bad_words_ids with several tokens")
    if not ignored:
        return ()
    return (f"{name} sets {', '.join(ignored)}: not applied by any strategy here",)


def _end_ids(settings: Any) -> set[int]:
    ends = getattr(settings, "eos_token_id", None)
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])
