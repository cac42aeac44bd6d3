"""How many n-gram drafts are worth a wider window: as many as are likely to pay, down to none.

A draft's chance is what drafts from contexts of that length have come to in this run so far; a window's cost is the engine's. The number
of drafts is the one with the most expected tokens per time. Clocks play no part: the same run drafts the same.
"""

from collections.abc import Sequence

PRIOR, PRIOR_WEIGHT = (0.3, 0.55, 0.75, 0.85), 2.0  # chance by context length 1, 2, 3 and more, worth so many drafts
FADE = 0.98  # of old evidence, per round: what failed long ago is tried again
SURE = 0.98  # no chance is better than this


class DraftLength:
    """Chances by context length, and the best number of drafts.

    costs: what a window with 1, 2, ... drafts takes more than one without, in units of that; the last difference goes on.
    """

    def __init__(self, costs: Sequence[float]) -> None:
        self._costs = tuple(costs) or (0.0,)  # where nothing could be measured, a window is taken to cost nothing
        self._tried: dict[int, tuple[float, float]] = {}  # context length -> (accepted, tried), faded

    def chance(self, size: int) -> float:
        """Of a draft that a context of `size` tokens proposed, if it is reached."""
        accepted, tried = self._tried.get(size, (0.0, 0.0))
        prior = PRIOR[min(size, len(PRIOR)) - 1] if size else 0.0
        return min(SURE, (accepted + prior * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT))

    def cost(self, drafts: int) -> float:
        """What so many drafts add to a window."""
        costs = self._costs
        if drafts <= len(costs):
            return costs[drafts - 1] if drafts else 0.0
        step = costs[-1] - costs[-2] if len(costs) > 1 else costs[-1]
        return costs[-1] + (drafts - len(costs)) * step

    def best(self, sizes: Sequence[int]) -> int:
        """How many of the drafts, proposed by contexts of these lengths, to send."""
        best, rate, tokens, reached = 0, 1.0, 1.0, 1.0
        for count, size in enumerate(sizes, start=1):
            reached *= self.chance(size)
            tokens += reached
            if tokens / (1 + self.cost(count)) > rate:
                best, rate = count, tokens / (1 + self.cost(count))
        return best

    def learn(self, sizes: Sequence[int], accepted: int) -> None:
        """A round's drafts by their contexts' lengths, and how many stood; what lies behind the first rejected one says nothing."""
        self._tried = {size: (FADE * good, FADE * tried) for size, (good, tried) in self._tried.items()}
        for place, size in enumerate(sizes[: accepted + 1]):
            good, tried = self._tried.get(size, (0.0, 0.0))
            self._tried[size] = (good + (place < accepted), tried + 1)
