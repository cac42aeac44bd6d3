"""Logits processors: from a model's logits (..., V) to the probabilities (..., V) that tokens are sampled from.

They are pure: logits are never modified, and the same processor gives the target's distribution p and the drafter's q.
Greedy decoding is the one-hot distribution of the highest logit, so no decoder needs a greedy branch. Order:
temperature, top-k, top-p. Ties go to the lowest id. Probabilities are float64 (float32 if one-hot, and on MPS, which
has no float64).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from utils.bounds import TEMPERATURE, TOP_P, WholeRange
from utils.errors import UserError

_FEW = 8  # tokens that are found one by one
_NUCLEUS_PREFIX = 128  # most nuclei are smaller


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute in one thread in this block or function. Over a few rows of a vocabulary, waking other
    threads takes longer than the work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class LogitsProcessor(Protocol):
    """Anything that turns logits (..., V) into probabilities (..., V)."""

    def __call__(self, logits: Tensor) -> Tensor: ...


class InvalidLogits(UserError):
    """A row of logits from which no distribution can be computed."""


def max_logits(logits: Tensor) -> Tensor:
    """The highest logit (..., 1) of each row. Raises InvalidLogits if it is NaN or infinite."""
    return _check_finite(logits.amax(dim=-1, keepdim=True))


def _check_finite(top: Tensor) -> Tensor:
    _check_tops(top.flatten().tolist())
    return top


def _check_tops(tops: Iterable[float]) -> None:
    # NaN and +inf propagate to the maximum; -inf is allowed as a mask unless it is the maximum.
    if not all(map(isfinite, tops)):
        raise InvalidLogits(
            "The model returned logits that are NaN or infinite, so no token can be sampled: try float32 or reload it."
        )


def _is_numpy(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def highest(rows: Tensor) -> list[tuple[float, int]]:
    """The largest entry of each row (k, V) and its id, the lowest of equal entries. NaN counts as larger."""
    if _is_numpy(rows):
        # One operation of NumPy instead of several of PyTorch, each of which takes longer than the maximum.
        values = rows.detach().numpy()
        return [(float(row[token]), int(token)) for row, token in zip(values, values.argmax(axis=-1), strict=True)]
    tops, ids = rows.max(dim=-1)
    # In one transfer, because each makes the host wait for a GPU. Ids are exact in float32 as well, since no vocabulary
    # has 2**24 of them; MPS has no float64.
    exact = torch.float32 if rows.device.type == "mps" else torch.float64
    return [(top, int(token)) for top, token in torch.stack((tops.to(exact), ids.to(exact)), dim=-1).tolist()]


def stable_topk(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids (..., count) of the largest entries of each row, largest first, equal entries by the lowest id.

    torch.topk is forty times faster than a sort of a vocabulary of 49,152, but which of several equal entries it
    returns is undefined. Therefore rows are sorted only if equal entries lie on both sides of the cut.
    """
    size = logits.shape[-1]
    values, ids = logits.topk(min(count + 1, size), dim=-1)  # one more, to see whether the cut separates equal entries
    equal = values[..., 1:] == values[..., :-1]  # (..., count)
    # The cut lies between the last two of the count + 1 values.
    if count < size and bool(equal[..., -1:].any()):
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    elif bool(equal.any()):
        # By id first, then by value with a stable sort: equal values keep the order of their ids.
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
    return values[..., :count], ids[..., :count]


@one_thread()
def top_tokens(row: Tensor, count: int) -> list[int]:
    """Ids of the `count` largest entries of one row (V,), largest first, equal entries by the lowest id. Ids of minus
    infinity, which cannot follow, are left out.
    """
    if _is_numpy(row) and count <= _FEW:
        return _few_top_tokens(row, count)
    values, ids = stable_topk(row, min(count, row.shape[-1]))
    return [token for token in torch.where(values > -torch.inf, ids, -1).tolist() if token >= 0]


def _few_top_tokens(row: Tensor, count: int) -> list[int]:
    """As `top_tokens`, by a maximum for each token: right after a forward pass few operations are faster."""
    values, found = row.detach().numpy().copy(), list[int]()
    for _ in range(min(count, len(values))):
        token = int(values.argmax())
        if values[token] == -inf:
            break
        found.append(token)
        values[token] = -inf
    return found


def top_k_probs(logits: Tensor, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Probabilities and ids (..., k) of each row's most likely tokens, most likely first."""
    values, ids = stable_topk(logits, min(top_k, logits.shape[-1]))
    return torch.softmax(_scale(values, _check_finite(values[..., :1]), temperature), dim=-1), ids


def truncate_top_p(probs: Tensor, top_p: float) -> Tensor:
    """The fewest of the probabilities (..., k), most likely first, with a total of at least `top_p`; renormalised."""
    before = pad(probs.cumsum(dim=-1)[..., :-1], (1, 0))  # mass before each token
    nucleus = probs * (before < top_p)  # a token belongs to the nucleus if the tokens before it have not reached top_p
    return nucleus / nucleus.sum(dim=-1, keepdim=True)


def nucleus_probs(
    logits: Tensor, temperature: float, top_p: float, prefix: int = _NUCLEUS_PREFIX
) -> tuple[Tensor, Tensor]:
    """Probabilities and ids (..., k) of the nucleus of mass `top_p`.

    Only the `prefix` largest entries are selected if they suffice.
    """
    probs, size = _softmax(logits, temperature), logits.shape[-1]  # (..., V)
    while prefix < size:
        values, ids = logits.topk(prefix, dim=-1)
        leading = probs.gather(-1, ids)
        last = (leading.cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True)  # index of the nucleus' last token
        # One more entry than the longest nucleus is needed, to compare it with the nucleus' last token.
        if int(last.max()) < prefix - 1:
            # topk orders equal entries arbitrarily, which matters only if the nucleus ends among them.
            if bool((values.gather(-1, last) == values.gather(-1, last + 1)).any()):
                break
            return truncate_top_p(leading, top_p), ids
        prefix *= 8
    ids = stable_topk(logits, size)[1]
    return truncate_top_p(probs.gather(-1, ids), top_p), ids


def _scatter(probs: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    """A distribution (..., V) from the probabilities (..., k) of a few ids."""
    return torch.zeros(logits.shape, dtype=probs.dtype, device=probs.device).scatter_(-1, ids, probs)


def _scale(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """(logits - top) / temperature. The result is at most 0, so no temperature can overflow."""
    dtype = torch.float32 if logits.device.type == "mps" else torch.float64
    # A copy even if the dtype is right, because the next operations work in place.
    return logits.to(dtype, copy=True).sub_(top).div_(temperature)


def _one_hot(logits: Tensor) -> Tensor:
    if _is_numpy(logits):
        found = highest(logits.reshape(-1, logits.shape[-1]))
        _check_tops(top for top, _ in found)
        ids = torch.tensor([token for _, token in found]).view(*logits.shape[:-1], 1)
    else:  # the ids stay on the device
        tops, ids = logits.max(dim=-1, keepdim=True)
        _check_finite(tops)
    return torch.zeros(logits.shape, device=logits.device).scatter_(-1, ids, 1.0)


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(_scale(logits, max_logits(logits), temperature), dim=-1)


@dataclass(frozen=True, slots=True)
class GreedyProcessor:
    """All probability on the highest logit, at any temperature."""

    temperature: float = 1
    name: ClassVar[str] = "greedy"

    def __post_init__(self) -> None:
        TEMPERATURE.check(self.temperature)

    def __call__(self, logits: Tensor) -> Tensor:
        return _one_hot(logits)


@dataclass(frozen=True, slots=True)
class NucleusProcessor:
    """Temperature, then the fewest most likely tokens with a total of at least top_p (Holtzman et al. 2020)."""

    temperature: float
    top_p: float
    name: ClassVar[str] = "nucleus"

    def __post_init__(self) -> None:
        TEMPERATURE.check(self.temperature)
        TOP_P.check(self.top_p)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return _one_hot(logits)
        # The nucleus is the whole vocabulary, which need not be sorted.
        if self.top_p == 1:
            return _softmax(logits, self.temperature)
        return _scatter(*nucleus_probs(logits, self.temperature, self.top_p), logits)


@dataclass(frozen=True, slots=True)
class MultinomialProcessor(NucleusProcessor):
    """softmax(logits / temperature), which is a nucleus of mass 1."""

    top_p: float = field(default=1, init=False, repr=False)
    name: ClassVar[str] = "multinomial"


@dataclass(frozen=True, slots=True)
class TopKNucleusProcessor:
    """Temperature, then the top_k most likely tokens, then the nucleus of mass top_p among those."""

    temperature: float
    top_k: int
    top_p: float
    name: ClassVar[str] = "topknucleus"

    def __post_init__(self) -> None:
        TEMPERATURE.check(self.temperature)
        WholeRange(1).check(self.top_k, "top-k")
        TOP_P.check(self.top_p)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return _one_hot(logits)
        probs, ids = top_k_probs(logits, self.temperature, self.top_k)
        return _scatter(probs if self.top_p == 1 else truncate_top_p(probs, self.top_p), ids, logits)


@dataclass(frozen=True, slots=True)
class TopKProcessor(TopKNucleusProcessor):
    """Temperature, then the top_k most likely tokens (Fan et al. 2018)."""

    top_p: float = field(default=1, init=False, repr=False)
    name: ClassVar[str] = "topk"


PROCESSORS: dict[str, Callable[..., LogitsProcessor]] = {
    processor.name: processor
    for processor in (GreedyProcessor, MultinomialProcessor, TopKProcessor, NucleusProcessor, TopKNucleusProcessor)
}
