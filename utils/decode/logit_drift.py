"""How far a model's logits move when the same positions are computed in windows of another width.

Matrix kernels add up in an order that depends on the number of rows, so verifying five tokens at once and decoding them one by one may
round differently. Everything that explains or bounds that difference measures it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from utils.decode.model_session import ModelSession

STEPS, SHARE = 4096, 0.05  # of the highest logit: so many units in its last place, and never more than this share of it


def by_width(base: ModelSession, context: list[int], count: int, width: int) -> Tensor:
    """Logits (count, V) behind the last `count` tokens of the context, fed `width` at a time to a copy of `base`.

    base: a session that has been fed the context's tokens before those, or nothing.
    """
    session, begin = base.fork(), len(context) - count
    ends = range(begin + width, len(context) + width, width)
    chunks = [(end - width, min(end, len(context))) for end in ends]
    return torch.cat([session.feed(context[:last], keep=last - first) for first, last in chunks])


def most_rounding(logits: Tensor) -> float:
    """How far rounding can be believed to move logits (..., V) of this format; anything beyond is a mistake, not a rounding."""
    scale = max(1.0, float(logits.amax(dim=-1).abs().max()))  # of the highest logits: the lowest may be a mask
    return min(STEPS * torch.finfo(logits.dtype).eps, SHARE) * scale


@dataclass(frozen=True, slots=True)
class Spread:
    """Logits of the same positions computed in several ways: the largest difference between any two, and how many argmaxes flipped."""

    difference: float
    flips: int
    positions: int

    @classmethod
    def of(cls, versions: list[Tensor]) -> Spread:
        """versions: tensors (k, V)."""
        stacked = torch.stack([version.float() for version in versions])  # (ways, k, V)
        difference = float(
            (stacked.amax(dim=0) - stacked.amin(dim=0)).nan_to_num().max()
        )  # -inf less -inf: a masked token
        choices = stacked.argmax(dim=-1)
        return cls(difference, int((choices != choices[0]).any(dim=0).sum()), choices.shape[-1])

    def __add__(self, other: Spread) -> Spread:
        return Spread(
            max(self.difference, other.difference), self.flips + other.flips, self.positions + other.positions
        )
