"""Where the time of a run goes: drafting, verifying, and all else. The clock stands outside: it wraps the drafter and the target's session,
and neither they nor the loop know of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Clock = Callable[[], float]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of one round: drafting (what the drafter does after it among it), verifying (the target's forward), and all of it.

    drafts: how many were worked out, those that were not proposed among them; by, by which kind of drafter, where several take turns.
    """

    drafting: float
    verifying: float
    whole: float
    drafts: int = 0
    by: str = ""

    @property
    def other(self) -> float:
        """Processors, noise, judging: what is left."""
        return max(0.0, self.whole - self.drafting - self.verifying)


class Stopwatch:
    """What was spent since it was last read."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._drafting = self._verifying = 0.0
        self._drafts, self._by = 0, ""

    def drafts(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do a drafter's work."""
        began = self._clock()
        try:
            return work(*arguments)
        finally:
            self._drafting += self._clock() - began

    def counts(self, draft: Any) -> None:
        """Count the drafts of a round."""
        self._drafts, self._by = len(draft.tokens) + draft.unsent, draft.by

    def verifies(self, session: Any, context: list[int], keep: int) -> Tensor:
        """Have the target compute."""
        began = self._clock()
        try:
            logits: Tensor = session.feed(context, keep)
            if logits.is_cuda:
                logits[0, 0].item()  # it has computed when its result is here; the loop would wait next
            return logits
        finally:
            self._verifying += self._clock() - began

    def read(self, whole: float) -> Lap:
        """A round that took so long as a whole."""
        lap = Lap(self._drafting, self._verifying, whole, self._drafts, self._by)
        self._drafting, self._verifying, self._drafts, self._by = 0.0, 0.0, 0, ""
        return lap


class TimedDrafter:
    """A drafter (sampling.drafters.model.Drafter) under a stopwatch."""

    def __init__(self, drafter: Any, watch: Stopwatch) -> None:
        self._drafter, self._watch = drafter, watch

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._watch.drafts(self._drafter.begin, prompt, context)

    def propose(self, context: list[int], count: int) -> Any:
        draft = self._watch.drafts(self._drafter.propose, context, count)
        self._watch.counts(draft)
        return draft

    def commit(self, context: list[int], verified: Any) -> None:
        self._watch.drafts(self._drafter.commit, context, verified)


class TimedSession:
    """The target's session under a stopwatch, as the loop uses it."""

    def __init__(self, session: Any, watch: Stopwatch) -> None:
        self._session, self._watch = session, watch
        self.name: str = session.name
        self.begin, self.room, self.rewind = session.begin, session.room, session.rewind
        self.take_features: Callable[[], Tensor | None] = session.take_features

    def feed(self, context: list[int], keep: int) -> Tensor:
        return self._watch.verifies(self._session, context, keep)
