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

from utils.decode.model_info import model_name, vocabulary_size
from utils.errors import UserError

OWN_ENDS = "model"
EndIds = int | Iterable[int] | str | None  # an argument of the library functions

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

    `never` are ids with probability 0. `at_first` are further ids that the first free token cannot be. `forced` is the
    first token.
    """

    never: tuple[int, ...] = ()
    at_first: tuple[int, ...] = ()
    forced: int | None = None

    @classmethod
    def of(cls, model: Any) -> Self:
        """The rules in a model's generation settings. Ids outside the vocabulary are dropped.

        Raises UserError for settings that are not token ids, and for rules that forbid every token.
        """
        settings = getattr(model, "generation_config", None)
        size = vocabulary_size(model)
        words = _valid(model, "bad_words_ids", depth=2) or []
        single = {word[0] for word in words if len(word) == 1}
        # As in `generate`, bad_words_ids cannot forbid an end token.
        never = {*(_valid(model, "suppress_tokens", depth=1) or ()), *(single - _end_ids(settings))}
        begins = _valid(model, "begin_suppress_tokens", depth=1) or ()
        # `generate` forces it after exactly one token of context: the start token of an encoder-decoder.
        forced = _valid(model, "forced_bos_token_id", depth=0) if model.config.is_encoder_decoder else None
        rules = cls(_within(sorted(never), size), _within(begins, size), next(iter(_within([forced], size)), None))
        rules._check_some_allowed(model_name(model), size)
        return rules

    def _check_some_allowed(self, name: str, size: int) -> None:
        at_first = () if self.forced is not None else self.at_first
        for ids, setting in ((self.never, "suppress_tokens"), ((*self.never, *at_first), "begin_suppress_tokens")):
            if len(set(ids)) == size:
                raise UserError(
                    f"'{name}' forbids all of its {size:,} tokens: shorten {setting} in its generation_config.json."
                )

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


def end_tokens(ids: EndIds, model: Any) -> int | Iterable[int] | None:
    """The ids that end a text. OWN_ENDS stands for those in the model's generation settings."""
    if isinstance(ids, str) and ids == OWN_ENDS:
        return _end_ids(getattr(model, "generation_config", None))
    return ids  # type: ignore[return-value]  # any other string is refused with the other values that are not ids


def _valid(model: Any, field: str, *, depth: int) -> Any:
    """A generation setting, or None: an id, or lists of ids of this depth. Raises UserError for anything else."""
    value = getattr(getattr(model, "generation_config", None), field, None)
    if value is None or _has_ids(value, depth):
        return value
    raise UserError(
        f"{field} {str(value)[:40]!r} of '{model_name(model)}' does not consist of token ids: "
        "correct or delete its generation_config.json."
    )


def _has_ids(value: Any, depth: int) -> bool:
    if not depth:
        return type(value) is int  # not bool, which is a subclass
    return isinstance(value, list | tuple) and all(_has_ids(part, depth - 1) for part in value)


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
