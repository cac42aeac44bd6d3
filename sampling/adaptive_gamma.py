"""How many drafts are worth a wider window: as many as are likely to pay, down to none.

What is known of a draft before it is judged (how long a context proposed it, how sure the drafter was, its place in the round) is its mark.
A draft's chance is what drafts with that mark have come to in this run so far; its cost is the table's. A round is as long as each further
draft brings more tokens than the run makes in the time it takes. Clocks play no part: the same run drafts the same.

No rule is biased by it: whether there is one more draft depends on earlier drafts and on laws, never on the token that would be drawn.
(Dropping a drawn draft because it looks unlikely would be another matter.) That the noise of a round may be drawn again in the next, where
the length depends on discarded drafts, is why it is keyed by the round's start, see utils.decode.noise.
"""

from collections.abc import Sequence

from utils.metrics.costs import Costs

Mark = tuple[str, int]

# Chance by mark before anything is known, worth PRIOR_WEIGHT drafts. Beyond the last, the last.
PRIORS = {
    "size": (0.0, 0.3, 0.55, 0.75, 0.85),  # tokens of the context that proposed it; 0: drawn from the seed
    "sure": (
        0.22,
        0.38,
        0.49,
        0.59,
        0.67,
        0.76,
        0.86,
        0.96,
    ),  # eighths of the drafter's highest probability, as a head was seen to stand
    "place": (0.6,),  # in its round, from 0
}
PRIOR_WEIGHT = 2.0
FADE = 0.98  # of old evidence, per round: what failed long ago is tried again
SURE = 0.98  # no chance is better than this
AHEAD = 8  # further drafts that are thought of


class Tempo:
    """What a run makes: tokens per time, in plain steps, by the table of costs. Old rounds fade."""

    def __init__(self) -> None:
        self._tokens = self._time = PRIOR_WEIGHT  # plain decoding to begin with

    def add(self, tokens: int, time: float) -> None:
        """A round."""
        self._tokens, self._time = FADE * self._tokens + tokens, FADE * self._time + time

    @property
    def pace(self) -> float:
        """Tokens per time so far, at least that of plain decoding."""
        return max(1.0, self._tokens / self._time)


class DraftLength:
    """Chances by mark, and the number of drafts with the most value.

    costs: of windows. step: of one draft, in plain steps; n-grams cost next to nothing. tempo: that of the run, where other drafters draft
    for it too; those learn what they were asked for, each by itself.
    """

    def __init__(self, costs: Costs, step: float = 0.0, tempo: Tempo | None = None) -> None:
        self._costs, self._step = costs, step
        self._tried: dict[Mark, tuple[float, float]] = {}  # (accepted, tried), faded
        self._shares, self._tempo = tempo is not None, tempo or Tempo()

    def chance(self, mark: Mark) -> float:
        """Of a draft with this mark, if it is reached."""
        priors = PRIORS[mark[0]]
        prior = priors[min(mark[1], len(priors) - 1)]
        accepted, tried = self._tried.get(mark, (0.0, 0.0))
        return min(SURE, (accepted + prior * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT))

    def cost(self, drafts: int) -> float:
        """What so many drafts add to a round."""
        return self._costs.window(drafts) + drafts * self._step

    @property
    def pace(self) -> float:
        """Of the run so far."""
        return self._tempo.pace

    def best(self, marks: Sequence[Mark]) -> int:
        """How many of these drafts, all of them at hand, to send."""
        values = self._values(marks)
        return values.index(max(values))

    def goes_on(self, marks: Sequence[Mark]) -> bool:
        """Whether to compute a draft behind those with these marks, knowing only its place."""
        count = len(marks)
        values = self._values([*marks, *(("place", place) for place in range(count, count + AHEAD))])
        return max(values[count + 1 :]) > values[count]

    def sends(self, marks: Sequence[Mark]) -> bool:
        """Whether the last of these, whose law is known by now, is worth a wider window: what it took is spent."""
        reached = 1.0
        for mark in marks:
            reached *= self.chance(mark)
        count = len(marks)
        return reached > self.pace * (self._costs.window(count) - self._costs.window(count - 1))

    def _values(self, marks: Sequence[Mark]) -> list[float]:
        """Of sending 0, 1, ... drafts: expected tokens, less what the run makes in the time."""
        tokens, reached, pace = 0.0, 1.0, self.pace
        values = [0.0]
        for count, mark in enumerate(marks, start=1):
            reached *= self.chance(mark)
            tokens += reached
            values.append(tokens - pace * self.cost(count))
        return values

    def learn(self, marks: Sequence[Mark], accepted: int, computed: int = 0) -> None:
        """A round's drafts by their marks, and how many stood; what lies behind the first rejected one says nothing.

        computed: drafts whose law was computed, where that is more than were sent.
        """
        self._tried = {mark: (FADE * good, FADE * tried) for mark, (good, tried) in self._tried.items()}
        for place, mark in enumerate(marks[: accepted + 1]):
            for known in (mark, ("place", place)):
                good, tried = self._tried.get(known, (0.0, 0.0))
                self._tried[known] = (good + (place < accepted), tried + 1)
        if marks or computed or not self._shares:  # where nothing was drafted, another drafter may have been asked
            count = len(marks)
            self._tempo.add(accepted + 1, 1 + self._costs.window(count) + max(count, computed) * self._step)
