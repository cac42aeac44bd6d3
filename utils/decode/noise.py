"""Randomness: one seed, the same generator state before every run, and noise that is looked up rather than drawn in
sequence.

Noise is a pure function of (seed, domain, turn, position, round start, token id), computed by the counter-based
Philox generator on the host. So it is the same on every device and for every strategy. The target's noise is keyed by
turn and position alone. Draft-side noise is keyed by the round's start as well: reusing it for a position that is
drafted again would condition on the rejection.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from utils.bounds import MAX_SEED, SEED
from utils.logits_processor import highest


class Domain(IntEnum):
    """Independent sources of noise under one seed."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    FILL = 4


def fix_seeds(seed: int) -> None:
    """Reset Python, NumPy, torch (CPU and all GPUs) and cuDNN to the same state. Called before each run."""
    random.seed(seed)
    np.random.seed(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # without the search for other devices, which takes milliseconds
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def resolve_seed(seed: int | None) -> int:
    """`seed`, or one drawn from torch's default generator if it is None. Raises UserError if it is out of range."""
    if seed is None:
        return int(torch.randint(MAX_SEED + 1, ()).item())
    return SEED.check(seed, "seed")


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one run. Positions count the run's new tokens from 0; `start` is the position at which a round
    begins.

    turn: the number of the answer in its conversation, from 0, so that a second answer does not reuse the first one's
    noise.
    """

    seed: int
    turn: int = 0

    def uniform(self, domain: Domain, position: int, start: int) -> float:
        """One float64 in the open interval (0, 1)."""
        return float(_uniforms(self._raw(domain, position, start, count=1))[0])

    def sample(self, weights: Tensor, position: int) -> int:
        """A token id drawn from a distribution, or a residual of one, (V,), with the target's noise at this
        position.
        """
        return next(self.samples(weights[None], position))

    def samples(self, weights: Tensor, start: int) -> Iterator[int]:
        """For each row of `weights` (k, V) the token drawn at positions start, start + 1, ...

        A row is drawn from only when its token is requested. One-hot rows need no noise and leave the device in one
        transfer.
        """
        if _is_drawn(weights):
            for row in range(len(weights)):
                own = weights[row].cpu()
                top, token = highest(own[None])[0]
                yield token if top == 1.0 else self._exponential_race(own, start + row)
            return
        for row, (top, token) in enumerate(highest(weights)):
            yield token if top == 1.0 else self._exponential_race(weights[row], start + row)

    def _exponential_race(self, weights: Tensor, position: int) -> int:
        """argmin E_i / w_i over exponential noise E: the Gumbel-max trick without its second logarithm.

        The token depends on (seed, position, token id) and on the weights, never on how many draws came before.
        """
        values = weights.cpu().double().numpy()
        ids = np.flatnonzero(values)
        raw = self._raw(Domain.TARGET, position, 0, count=len(values))  # one number per token id, never per rank
        if len(ids) < len(values) // 4:  # gathering a few entries is cheaper, most is not; the result is the same
            return int(ids[_race_winner(raw[ids], values[ids])])
        return _race_winner(raw, values)

    def pick(self, weights: Tensor, domain: Domain, position: int, start: int) -> int:
        """A token id drawn from a distribution, or a residual of one, (V,), by inversion, with draft-side noise."""
        weights = weights.cpu() if _is_drawn(weights) else weights
        top, likeliest = highest(weights[None])[0]
        if top == 1.0:  # one-hot: no noise needed
            return likeliest
        # Summed on the host, in one order for all devices. A residual sums to less than 1: scale u instead.
        reached = weights.cpu().cumsum(dim=0)
        threshold = self.uniform(domain, position, start) * float(reached[-1])
        index = int(torch.searchsorted(reached, threshold, right=True))
        return index if index < len(reached) else int(weights.nonzero()[-1])  # rounding may reach the very end

    def _raw(self, domain: Domain, position: int, start: int, *, count: int) -> np.ndarray:
        # Philox itself counts blocks of numbers in word 0; the other words name the position.
        counter = np.array([0, position, self.turn, start], dtype=np.uint64)
        key = np.array([self.seed, domain], dtype=np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(count)


def _is_drawn(weights: Tensor) -> bool:
    """Whether all of a row will be read by the host: one-hot rows are in float32. Fetching it at once saves a wait."""
    return weights.device.type != "cpu" and weights.dtype == torch.float64


def _race_winner(raw: np.ndarray, weights: np.ndarray) -> int:
    # A weight of zero, or close to it, finishes at infinity.
    with np.errstate(over="ignore", divide="ignore"):
        # E_i = -log u_i, in float64: uniforms of 24 bits would truncate the tail.
        return int(np.argmin(-np.log(_uniforms(raw)) / weights))


def _uniforms(raw: np.ndarray) -> np.ndarray:
    """Float64 in the open interval (0, 1) from 64 random bits: 52 of them plus one half, so never 0 and never rounded
    up to 1.
    """
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
