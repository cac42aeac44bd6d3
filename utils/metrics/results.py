"""What a run came to: its steps, its clock, every rate, and how it compares with the target's own run.

`collect` drains any decoder; its clock runs only inside `next()`, so nothing a watcher does (printing, decoding text) is billed to a
strategy. A rate without a denominator is None.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from utils.decode.steps import FinishReason, Step
from utils.metrics.draft_trace import DraftNote, Notebook
from utils.metrics.stopwatch import Lap, Stopwatch


def tokens_of(steps: Iterable[Step]) -> list[int]:
    """All new tokens of a run."""
    return [token for step in steps for token in step.tokens]


def acceptance_of(steps: Iterable[Step]) -> float | None:
    """Accepted drafts per draft; None where nothing was drafted."""
    counts = [(step.accepted, len(step.drafted)) for step in steps]
    return _ratio(sum(accepted for accepted, _ in counts), sum(drafted for _, drafted in counts))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished or interrupted run. Times are in seconds, spent inside the decoder, prefill and storage fill included.

    laps: where the time of each step went, where a stopwatch was at hand. notes: on the drafts of each, where a notebook was.
    """

    steps: tuple[Step, ...]
    seconds: float
    first_seconds: float | None
    finish: FinishReason
    laps: tuple[Lap, ...] = ()
    notes: tuple[tuple[DraftNote, ...], ...] = ()

    @property
    def tokens(self) -> list[int]:
        return tokens_of(self.steps)

    @property
    def tokens_per_second(self) -> float | None:
        return _ratio(len(self.tokens), self.seconds)

    @property
    def drafted(self) -> int:
        return sum(len(step.drafted) for step in self.steps)

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps)

    @property
    def acceptance_rate(self) -> float | None:
        return acceptance_of(self.steps)

    @property
    def target_forwards(self) -> int:
        return sum(step.forwards for step in self.steps)

    @property
    def tokens_per_target_forward(self) -> float | None:
        return _ratio(len(self.tokens), self.target_forwards)

    @property
    def drafts_per_round(self) -> float | None:
        return _ratio(self.drafted, len(self.steps))

    @property
    def declined_rounds(self) -> int:
        """Rounds in which nothing was drafted."""
        return sum(not step.drafted for step in self.steps)

    @property
    def accepted_by_position(self) -> list[tuple[int, int]]:
        """(accepted, tried) by the draft's place in its round; tried counts rounds whose earlier drafts were all accepted."""
        longest = max((len(step.drafted) for step in self.steps), default=0)
        return [
            (
                sum(step.accepted > place for step in self.steps),
                sum(len(step.drafted) > place and step.accepted >= place for step in self.steps),
            )
            for place in range(longest)
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside the target's. speedup: ratio of tokens per second. first_difference: 0-based index into the token ids."""

    speedup: float | None = None
    same: bool | None = None
    first_difference: int | None = None


def _ignore(step: Step, lap: Lap, notes: Sequence[DraftNote]) -> None:
    """The watcher that watches nothing."""


def collect(
    steps: Iterator[Step],
    watch: Callable[[Step, Lap, Sequence[DraftNote]], None] = _ignore,
    clock: Callable[[], float] = time.perf_counter,
    *,
    stopwatch: Stopwatch | None = None,
    notebook: Notebook | None = None,
) -> Generation:
    """Drain a decoder. Ctrl-C ends it there; what was made until then is returned with FinishReason.INTERRUPTED.

    stopwatch, notebook: those that the decoder runs under.
    """
    made: list[Step] = []
    laps: list[Lap] = []
    notes: list[tuple[DraftNote, ...]] = []
    stopwatch = stopwatch or Stopwatch(clock)
    seconds: float = 0.0
    first: float | None = None
    began: float | None = None
    finish = FinishReason.LENGTH
    try:
        while True:
            began = clock()
            step = next(steps, None)
            spent, began = clock() - began, None
            seconds += spent
            if step is None:
                break
            first = seconds if first is None else first
            made.append(step)
            laps.append(stopwatch.read(spent))
            finish = step.finish or finish
            notes.append(notebook.read(step) if notebook else ())
            watch(step, laps[-1], notes[-1])
    except KeyboardInterrupt:
        finish = FinishReason.INTERRUPTED
        seconds += 0.0 if began is None else clock() - began
    return Generation(tuple(made), seconds, first, finish, tuple(laps), tuple(notes) if notebook else ())


def pooled(runs: Iterable[Generation]) -> Generation:
    """Several runs as one, for rates over all of them."""
    runs = list(runs)
    return Generation(
        tuple(step for run in runs for step in run.steps), sum(run.seconds for run in runs), None, FinishReason.LENGTH
    )


def compare(run: Generation, target: Generation | None, *, alike: bool = True) -> Comparison:
    """A run against the target's run; nothing is claimed where that is missing or either was interrupted.

    alike: whether both were asked the same; where not, speeds alone are compared.
    """
    if target is None:
        return Comparison()
    if run is target:
        return Comparison(speedup=1.0, same=True)
    if FinishReason.INTERRUPTED in (run.finish, target.finish):
        return Comparison()
    ours, theirs = run.tokens_per_second, target.tokens_per_second
    speedup = ours / theirs if ours is not None and theirs else None
    if not alike:
        return Comparison(speedup=speedup)
    difference = first_difference(run.tokens, target.tokens)
    return Comparison(speedup=speedup, same=difference is None, first_difference=difference)


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """Where two token lists, or texts, first part, the shorter one's length if one begins the other; None if they are equal."""
    for index, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
