"""Where randomness comes from: one seed, one state before every run, and noise that is looked up rather than drawn in turn.

Noise is a pure function of (seed, domain, turn, position, round start, token id), made by the counter-based Philox generator on the host,
so that a position's noise is the same on every device, whatever was computed before, by whichever strategy. The target's noise is keyed
by turn and position alone. Noise that only the draft side sees (drafts, acceptance, residual) is keyed by the round's start as well: a
position may be drafted again in the next round, and reusing its numbers there would condition on the rejection.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from operator import index
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor

from utils.bounds import MAX_SEED
from utils.errors import UserError


class Domain(IntEnum):
    """Independent sources of noise under one seed."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    FILL = 4


def fix_seeds(seed: int) -> None:
    """Put Python, NumPy, torch (CPU and every GPU) and cuDNN into the same state before each run."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def resolve_seed(seed: int | None) -> int:
    """`seed`, or where it is None one drawn from torch's default generator (which moves on). Raises UserError out of range."""
    if seed is None:
        return int(torch.randint(MAX_SEED + 1, ()).item())
    if not isinstance(seed, SupportsIndex) or not 0 <= index(seed) <= MAX_SEED:
        raise UserError(f"seed {seed} is out of range: a whole number from 0 to {MAX_SEED}.")
    return index(seed)


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one run. Positions count the run's new tokens from 0; `start` is the position at which a round begins.

    turn: which answer of a conversation this is, from 0, so that a second answer does not repeat the first one's numbers.
    """

    seed: int
    turn: int = 0

    def uniform(self, domain: Domain, position: int, start: int) -> float:
        """One float64 in the open interval (0, 1)."""
        return float(_uniforms(self._raw(domain, position, start, count=1))[0])

    def sample(self, weights: Tensor, position: int) -> int:
        """A token id drawn from a law (V,), or from a residual of one, with the target's noise at this position."""
        return next(self.samples(weights[None], position))

    def samples(self, law: Tensor, start: int) -> Iterator[int]:
        """For each row of a law (k, V) the token drawn at positions start, start + 1, ...; a row is drawn from only when it is asked for.

        Rows that are one-hot need no noise and come over from the device together.
        """
        tops, likeliest = (part.tolist() for part in law.max(dim=-1))
        for row, (top, token) in enumerate(zip(tops, likeliest, strict=True)):
            yield token if top == 1.0 else self._race(law[row], start + row)

    def _race(self, weights: Tensor, position: int) -> int:
        """An exponential race, argmin E_i / w_i, which is the Gumbel-max trick without its second logarithm.

        The token depends on (seed, position, token id) and on the weights, never on how many draws came before.
        """
        law = weights.cpu().double().numpy()
        ids = np.flatnonzero(law)
        raw = self._raw(Domain.TARGET, position, 0, count=len(law))  # one number per token id, never per rank
        if (
            len(ids) < len(law) // 4
        ):  # gathering a few is cheaper, gathering most is not; either way the numbers are the same
            return int(ids[_first_home(raw[ids], law[ids])])
        return _first_home(raw, law)

    def pick(self, weights: Tensor, domain: Domain, position: int, start: int) -> int:
        """A token id drawn from a law (V,), or from a residual of one, by inversion, with the noise of a draft-side domain."""
        top, likeliest = weights.max(dim=0)
        if float(top) == 1.0:  # a one-hot law needs no noise
            return int(likeliest)
        reached = weights.cpu().cumsum(dim=0)
        threshold = self.uniform(domain, position, start) * float(reached[-1])
        index = int(torch.searchsorted(reached, threshold, right=True))
        return (
            index if index < len(reached) else int(weights.nonzero()[-1])
        )  # rounding may put the threshold at the very end

    def _raw(self, domain: Domain, position: int, start: int, *, count: int) -> np.ndarray:
        counter = np.array([0, position, self.turn, start], dtype=np.uint64)
        key = np.array([self.seed, domain], dtype=np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(count)


def _first_home(raw: np.ndarray, weights: np.ndarray) -> int:
    # A weight of nothing, or next to it, loses the race at infinity.
    with np.errstate(over="ignore", divide="ignore"):
        return int(np.argmin(-np.log(_uniforms(raw)) / weights))


def _uniforms(raw: np.ndarray) -> np.ndarray:
    """Float64 in the open interval (0, 1) from 64 random bits: 52 of them and a half, so never 0 and never rounded up to 1."""
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
