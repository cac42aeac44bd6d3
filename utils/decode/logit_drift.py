"""How far a model's logits move when the same positions are computed with a different number of rows per pass.

Matrix kernels sum in an order that depends on the number of rows, so a verify pass over five tokens and five
decode steps may round differently. Everything that explains or bounds that difference measures it here.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from utils.decode.session import ForkableSession

MAX_ULPS, MAX_RELATIVE = 4096, 0.05  # of the highest logit: units in the last place, and never more than this share


def logits_by_width(base: ForkableSession, context: list[int], count: int, width: int) -> Tensor:
    """Logits (count, V) after the last `count` tokens of the context, fed `width` at a time to a copy of `base`.

    `base` is a session that was fed the tokens before those, or nothing.
    """
    session, begin = base.fork(), len(context) - count
    ends = range(begin + width, len(context) + width, width)
    chunks = [(end - width, min(end, len(context))) for end in ends]
    return torch.cat([session.feed(context[:last], keep=last - first) for first, last in chunks])


def max_rounding(logits: Tensor) -> float:
    """The largest change of logits (..., V) of this dtype that rounding can explain. Anything beyond is an error."""
    scale = max(1.0, float(logits.amax(dim=-1).abs().max()))  # of the highest logits: the lowest may be a mask
    return min(MAX_ULPS * torch.finfo(logits.dtype).eps, MAX_RELATIVE) * scale


def largest_difference(logits: Tensor, others: Tensor) -> float:
    """The largest difference of logits (k, V) that were computed in two ways."""
    return LogitDrift.of([logits, others]).difference


@dataclass(frozen=True, slots=True)
class LogitDrift:
    """Logits of the same positions computed in several ways: the largest difference, and how many argmaxes flipped."""

    difference: float
    flips: int
    positions: int

    @classmethod
    def of(cls, versions: list[Tensor]) -> Self:
        """Compare tensors (k, V), one for each way of computing the same positions."""
        stacked = torch.stack([version.float() for version in versions])  # (ways, k, V)
        spread = stacked.amax(dim=0) - stacked.amin(dim=0)
        difference = float(spread.nan_to_num().max())  # NaN is -inf minus -inf: a masked token
        choices = stacked.argmax(dim=-1)
        return cls(difference, int((choices != choices[0]).any(dim=0).sum()), choices.shape[-1])

    def __add__(self, other: "LogitDrift") -> "LogitDrift":
        difference = max(self.difference, other.difference)
        return LogitDrift(difference, self.flips + other.flips, self.positions + other.positions)
