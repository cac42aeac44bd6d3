"""Processors: from a model's logits (..., V) to the probability law (..., V) that tokens are drawn from.

They are pure values: calling one never writes into the logits, and the same instance makes the target's law p and the drafter's law q.
Greedy is the one-hot law of the highest logit, so no decoder and no verification rule has a branch for it. Order, as in the field:
temperature, then top-k, then top-p. Ties are broken by the lowest id. Laws are float64 (float32 where they are one-hot, and on devices that
have no float64).
"""

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from utils.bounds import MAX_TEMPERATURE
from utils.errors import UserError

_NUCLEUS_PREFIX = 128  # most nuclei are smaller


class LogitsProcessor(Protocol):
    """Anything that turns logits (..., V) into probabilities (..., V)."""

    def __call__(self, logits: Tensor) -> Tensor: ...


class UnusableLogits(UserError):
    """A row of logits that no law can be made of."""


def highest(logits: Tensor) -> Tensor:
    """The highest logit (..., 1) of each row. Raises UnusableLogits unless it is finite (so no NaN, no +inf, not -inf alone)."""
    return _finite(logits.amax(dim=-1, keepdim=True))


def _finite(top: Tensor) -> Tensor:
    if not all(map(isfinite, top.flatten().tolist())):
        raise UnusableLogits(
            "The model returned logits that are NaN or infinite, so no token can be drawn; try float32 or load it again."
        )
    return top


def leading(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids (..., count) of the largest entries of each row, largest first, equal ones by the lowest id.

    A top-k selection and not a sort, which costs forty times as much on a vocabulary of 49,152; only where the cut goes through equal
    entries, of which top-k may have taken any, is the whole row sorted.
    """
    size = logits.shape[-1]
    values, ids = logits.topk(min(count + 1, size), dim=-1)  # one more, to see whether the cut parts equals
    equal = values[..., 1:] == values[..., :-1]
    if count < size and bool(equal[..., -1:].any()):
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    elif bool(equal.any()):
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
    return values[..., :count], ids[..., :count]


def top_tokens(row: Tensor, count: int) -> list[int]:
    """Ids of the `count` largest entries of one row (V,), largest first, equal entries by the lowest id."""
    ids: list[int] = leading(row, min(count, row.shape[-1]))[1].tolist()
    return ids


def keep_top_k(logits: Tensor, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Probabilities and ids (..., k) of each row's most likely tokens, likeliest first; all others have probability 0."""
    values, ids = leading(logits, min(top_k, logits.shape[-1]))
    return torch.softmax(_scaled(values, _finite(values[..., :1]), temperature), dim=-1), ids


def keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """Probabilities (..., k), likeliest first, cut to the fewest whose mass reaches `top_p`, and renormalised."""
    before = pad(probs.cumsum(dim=-1)[..., :-1], (1, 0))
    kept = probs * (before < top_p)  # a token is in the nucleus iff the mass before it has not reached top_p
    return kept / kept.sum(dim=-1, keepdim=True)


def nucleus(logits: Tensor, temperature: float, top_p: float, prefix: int = _NUCLEUS_PREFIX) -> tuple[Tensor, Tensor]:
    """Probabilities and ids (..., k) of the nucleus of mass `top_p`; only as many entries are selected as it needs."""
    law, size = _tempered(logits, temperature), logits.shape[-1]
    while prefix < size:
        values, ids = logits.topk(prefix, dim=-1)
        probs = law.gather(-1, ids)
        last = (probs.cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True)  # place of the nucleus' last token
        if int(last.max()) < prefix - 1:
            # Selection takes equals as it likes, which matters only where the nucleus ends among them.
            if bool((values.gather(-1, last) == values.gather(-1, last + 1)).any()):
                break
            return keep_top_p(probs, top_p), ids
        prefix *= 8
    ids = leading(logits, size)[1]
    return keep_top_p(law.gather(-1, ids), top_p), ids


def _spread(probs: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    """A law (..., V) from the probabilities of a few ids."""
    return torch.zeros(logits.shape, dtype=probs.dtype, device=probs.device).scatter_(-1, ids, probs)


def _scaled(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """(logits - top) / temperature, at most 0, so that no temperature can overflow."""
    return logits.to(_law_dtype(logits), copy=True).sub_(top).div_(temperature)


def _one_hot(logits: Tensor) -> Tensor:
    top, ids = logits.max(dim=-1, keepdim=True)  # the first of equals
    _finite(top)
    return torch.zeros(logits.shape, device=logits.device).scatter_(-1, ids, 1.0)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(_scaled(logits, highest(logits), temperature), dim=-1)


def _law_dtype(logits: Tensor) -> torch.dtype:
    return torch.float32 if logits.device.type == "mps" else torch.float64


def _check_temperature(temperature: float) -> None:
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise UserError(f"Temperature {temperature:g} is out of range: 0 (greedy) to {MAX_TEMPERATURE:g}.")


def _check_top_k(top_k: int) -> None:
    if not isinstance(top_k, int) or top_k < 1:
        raise UserError(f"top-k {top_k} is out of range: a whole number of at least 1.")


def _check_top_p(top_p: float) -> None:
    if not 0 < top_p <= 1:
        raise UserError(f"top-p {top_p:g} is out of range: above 0, at most 1.")


@dataclass(frozen=True, slots=True)
class GreedyProcessor:
    """All mass on the highest logit. The temperature changes nothing; it is there so that processors can be exchanged."""

    temperature: float = 1
    name: ClassVar[str] = "greedy"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    def __call__(self, logits: Tensor) -> Tensor:
        return _one_hot(logits)


@dataclass(frozen=True, slots=True)
class MultinomialProcessor:
    """softmax(logits / temperature)."""

    temperature: float
    name: ClassVar[str] = "multinomial"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    def __call__(self, logits: Tensor) -> Tensor:
        return _one_hot(logits) if self.temperature == 0 else _tempered(logits, self.temperature)


@dataclass(frozen=True, slots=True)
class TopKProcessor:
    """Temperature, then the top_k most likely tokens (Fan et al. 2018)."""

    temperature: float
    top_k: int
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_top_k(self.top_k)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return _one_hot(logits)
        return _spread(*keep_top_k(logits, self.temperature, self.top_k), logits)


@dataclass(frozen=True, slots=True)
class NucleusProcessor:
    """Temperature, then the nucleus: the fewest most likely tokens whose mass reaches top_p (Holtzman et al. 2020)."""

    temperature: float
    top_p: float
    name: ClassVar[str] = "nucleus"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_top_p(self.top_p)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return _one_hot(logits)
        if self.top_p == 1:
            return _tempered(logits, self.temperature)
        return _spread(*nucleus(logits, self.temperature, self.top_p), logits)


@dataclass(frozen=True, slots=True)
class TopKNucleusProcessor:
    """Temperature, then the top_k most likely tokens, then the nucleus of mass top_p of what is left."""

    temperature: float
    top_k: int
    top_p: float
    name: ClassVar[str] = "topknucleus"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_top_k(self.top_k)
        _check_top_p(self.top_p)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return _one_hot(logits)
        probs, ids = keep_top_k(logits, self.temperature, self.top_k)
        return _spread(probs if self.top_p == 1 else keep_top_p(probs, self.top_p), ids, logits)
