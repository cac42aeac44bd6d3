"""Splits the time of a run into drafting, verifying and everything else.

The stopwatch wraps the drafter and the target's session. Neither they nor the loop know of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from torch import Tensor

from utils.decode.drafts import Draft, Drafter, Verified
from utils.decode.session import TargetSession

Clock = Callable[[], float]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Seconds of one round.

    `drafting` is the time in the drafter, including its work after the verify pass, `verifying` the target's forward
    pass, and `total` the whole round. `drafts` counts all computed drafts, proposed or not. `kind` is the drafter kind,
    if several take turns.
    """

    drafting: float
    verifying: float
    total: float
    drafts: int = 0
    kind: str = ""

    @property
    def other(self) -> float:
        """The rest: processors, noise, verification rules."""
        return max(0.0, self.total - self.drafting - self.verifying)


class Stopwatch:
    """Accumulates the time since it was last read."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._drafting = self._verifying = 0.0
        self._drafts, self._kind = 0, ""

    def time_drafter(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call a method of the drafter."""
        began = self._clock()
        try:
            return work(*args, **kwargs)
        finally:
            self._drafting += self._clock() - began

    def count(self, draft: Draft) -> None:
        """Count the drafts of a round."""
        # Withheld drafts took as long to compute as proposed ones.
        self._drafts, self._kind = len(draft.tokens) + draft.withheld, draft.kind

    def time_verify(self, session: TargetSession, context: list[int], keep: int) -> Tensor:
        """Run the target's forward pass."""
        began = self._clock()
        try:
            logits = session.feed(context, keep)
            if logits.is_cuda:
                logits[0, 0].item()  # CUDA is asynchronous: wait for the result, as the loop would do next
            return logits
        finally:
            self._verifying += self._clock() - began

    def read(self, total: float) -> RoundTiming:
        """The timing of a round that took `total` seconds. Starts the next round."""
        timing = RoundTiming(self._drafting, self._verifying, total, self._drafts, self._kind)
        self._drafting, self._verifying, self._drafts, self._kind = 0.0, 0.0, 0, ""
        return timing


class TimedDrafter:
    """A drafter under a stopwatch."""

    def __init__(self, drafter: Drafter, watch: Stopwatch) -> None:
        self._drafter, self._watch = drafter, watch

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self._watch.time_drafter(self._drafter.begin, prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        draft = self._watch.time_drafter(self._drafter.propose, context, count)
        self._watch.count(draft)
        return draft

    def commit(self, context: list[int], verified: Verified) -> None:
        self._watch.time_drafter(self._drafter.commit, context, verified)


class TimedSession:
    """The target's session under a stopwatch."""

    def __init__(self, session: TargetSession, watch: Stopwatch) -> None:
        self._session, self._watch = session, watch
        self.name = session.name
        # Untimed: only the forward pass counts as verifying.
        self.begin, self.room, self.rewind = session.begin, session.room, session.rewind
        self.take_features = session.take_features

    def feed(self, context: list[int], keep: int) -> Tensor:
        return self._watch.time_verify(self._session, context, keep)
