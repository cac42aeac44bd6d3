"""Processors: from a model's logits (..., V) to the probability law (..., V) that tokens are drawn from.

They are pure values: calling one never writes into the logits, and the same instance makes the target's law p and the drafter's law q.
Greedy is the one-hot law of the highest logit, so no decoder and no verification rule has a branch for it. Order, as in the field:
temperature, then top-k, then top-p. Ties are broken by the lowest id. Laws are float64 (float32 on devices that have no float64).
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from utils.bounds import MAX_TEMPERATURE
from utils.errors import UserError

_NUCLEUS_PREFIX = 1024  # most nuclei are smaller: sorting 49,152 entries costs forty times as much


class LogitsProcessor(Protocol):
    """Anything that turns logits (..., V) into probabilities (..., V)."""

    def __call__(self, logits: Tensor) -> Tensor: ...


def check_logits(logits: Tensor, name: str) -> None:
    """Raise UserError, naming the model, unless every row has a finite highest logit (so no NaN, no +inf, not all -inf)."""
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise UserError(f"{name} returned logits that are NaN or infinite, so no token can be drawn; try float32 or load it again.")


def keep_largest(values: Tensor, count: Tensor) -> Tensor:
    """Mask (..., V) of the `count` (..., 1) largest entries of each row; equal entries go by the lowest id."""
    most = int(count.max())
    kth = values.topk(most, dim=-1).values.gather(-1, count - 1)
    above, tied = values > kth, values == kth
    room = count - above.sum(dim=-1, keepdim=True)
    if bool((tied.sum(dim=-1, keepdim=True) == room).all()):
        return above | tied
    return above | (tied & (tied.cumsum(dim=-1) <= room))


def keep_top_k(probs: Tensor, top_k: int) -> Tensor:
    """The law (..., V) restricted to its `top_k` most likely tokens and renormalised."""
    if top_k >= probs.shape[-1]:
        return probs
    count = torch.full((*probs.shape[:-1], 1), top_k, dtype=torch.int64, device=probs.device)
    return _restrict(probs, keep_largest(probs, count))


def keep_top_p(probs: Tensor, top_p: float, prefix: int = _NUCLEUS_PREFIX) -> Tensor:
    """The law (..., V) restricted to the fewest most likely tokens whose mass reaches `top_p`, renormalised (Holtzman et al. 2020).

    Only the largest `prefix` entries are sorted; where they do not reach `top_p` in every row, ever more are.
    """
    if top_p >= 1.0:
        return probs
    size = probs.shape[-1]
    while True:
        ordered = probs.topk(min(prefix, size), dim=-1).values
        reached = ordered.cumsum(dim=-1)
        if prefix >= size or bool((reached[..., -1] >= top_p).all()):
            break
        prefix *= 8
    # A token is in the nucleus iff the mass before it has not reached top_p yet.
    count = (reached - ordered < top_p).sum(dim=-1, keepdim=True)
    return _restrict(probs, keep_largest(probs, count))


def top_tokens(row: Tensor, count: int) -> list[int]:
    """Ids of the `count` largest entries of one row (V,), largest first, equal entries by the lowest id."""
    count = min(count, row.shape[-1])
    kth = row.topk(count).values[-1]
    ids = (row >= kth).nonzero().squeeze(-1)
    values = row[ids].tolist()
    return [token for _, token in sorted(zip(values, ids.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1]))[:count]]


def _restrict(probs: Tensor, mask: Tensor) -> Tensor:
    kept = probs * mask
    return kept / kept.sum(dim=-1, keepdim=True)


def _one_hot(logits: Tensor) -> Tensor:
    check_logits(logits, "The model")
    law = torch.zeros(logits.shape, dtype=_law_dtype(logits), device=logits.device)
    return law.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature); the highest logit is subtracted first, so that no temperature can overflow."""
    if temperature == 0:
        return _one_hot(logits)
    check_logits(logits, "The model")
    exact = logits.to(_law_dtype(logits))
    return torch.softmax((exact - exact.amax(dim=-1, keepdim=True)) / temperature, dim=-1)


def _law_dtype(logits: Tensor) -> torch.dtype:
    return torch.float32 if logits.device.type == "mps" else torch.float64


def _check_temperature(temperature: float) -> None:
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise UserError(f"Temperature {temperature:g} is out of range: 0 (greedy) to {MAX_TEMPERATURE:g}.")


def _check_top_k(top_k: int) -> None:
    if top_k < 1 or top_k != int(top_k):
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
        return _tempered(logits, self.temperature)


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
        return keep_top_k(_tempered(logits, self.temperature), self.top_k)


@dataclass(frozen=True, slots=True)
class NucleusProcessor:
    """Temperature, then the nucleus of mass top_p (Holtzman et al. 2020)."""

    temperature: float
    top_p: float
    name: ClassVar[str] = "nucleus"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_top_p(self.top_p)

    def __call__(self, logits: Tensor) -> Tensor:
        return keep_top_p(_tempered(logits, self.temperature), self.top_p)


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
        return keep_top_p(keep_top_k(_tempered(logits, self.temperature), self.top_k), self.top_p)
