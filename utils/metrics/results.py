"""Results of a run: its steps, its time, all rates, and the comparison with the target's own run.

`collect` drains any decoder. Its clock runs only inside `next()`, so the time of observers (printing, decoding text) is
not counted. A rate without a denominator is None.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from utils.decode.steps import FinishReason, Step, by_position
from utils.metrics.draft_trace import DraftTrace, DraftTracer
from utils.metrics.stopwatch import Clock, RoundTiming, Stopwatch


def tokens_of(steps: Iterable[Step]) -> list[int]:
    """All new tokens of a run."""
    return [token for step in steps for token in step.tokens]


def acceptance_of(steps: Iterable[Step]) -> float | None:
    """The acceptance rate: accepted drafts per draft, or None if nothing was drafted."""
    counts = [(step.accepted, len(step.drafted)) for step in steps]
    drafted = sum(drafted for _, drafted in counts)
    return sum(accepted for accepted, _ in counts) / drafted if drafted else None


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished or interrupted run.

    `seconds` is the time inside the decoder, with prefill and storage fill; `first_seconds` is the time until the first
    step. `timings` and `traces` have one entry per step if a stopwatch or a tracer was used.
    """

    steps: tuple[Step, ...]
    seconds: float
    first_seconds: float | None
    finish: FinishReason
    timings: tuple[RoundTiming, ...] = ()
    traces: tuple[tuple[DraftTrace, ...], ...] = ()

    @property
    def tokens(self) -> list[int]:
        return tokens_of(self.steps)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Throughput after the first round, which contains the prefill."""
        later = len(self.tokens) - (len(self.steps[0].tokens) if self.steps else 0)
        seconds = self.seconds - (self.first_seconds or 0.0)
        return later / seconds if seconds > 0 and later > 0 else None

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
    def declined_rounds(self) -> int:
        """Rounds without drafts."""
        return sum(not step.drafted for step in self.steps)

    @property
    def accepted_by_position(self) -> list[tuple[int, int]]:
        """(accepted, verified) for each draft position."""
        return by_position([(len(step.drafted), step.accepted) for step in self.steps])


TOKEN, CHARACTER = "token", "character"  # what a position in a text counts


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run compared with its baseline's.

    `speedup` is a ratio of tokens per second, and `decode_speedup` excludes the first round. `first_difference` is a
    0-based index, and `unit` is what it counts. `baseline` is the name of the other row. Unknown figures are None.
    """

    speedup: float | None = None
    same: bool | None = None
    first_difference: int | None = None
    decode_speedup: float | None = None
    unit: str = TOKEN
    baseline: str | None = None

    @property
    def text(self) -> str:
        """Whether the text equals the baseline's, in the words of every table."""
        return "-" if self.same is None else difference_text(self.first_difference, self.unit)


def difference_text(first_difference: int | None, unit: str = TOKEN) -> str:
    """The cell of a table for the first difference of two texts."""
    return "same" if first_difference is None else f"differs at {unit} {first_difference + 1}"


Watcher = Callable[[Step, RoundTiming, Sequence[DraftTrace]], None]


def collect(
    steps: Iterator[Step],
    watch: Watcher = lambda step, timing, traces: None,
    clock: Clock = time.perf_counter,
    *,
    stopwatch: Stopwatch | None = None,
    tracer: DraftTracer | None = None,
) -> Generation:
    """Drain a decoder. Ctrl-C ends the run: earlier steps are returned with FinishReason.INTERRUPTED.

    `watch` receives each step. `stopwatch` and `tracer` are those that wrap the decoder's drafter and target.
    """
    made: list[Step] = []
    timings: list[RoundTiming] = []
    traces: list[tuple[DraftTrace, ...]] = []
    stopwatch = stopwatch or Stopwatch(clock)
    seconds: float = 0.0
    first: float | None = None
    began: float | None = None  # None outside `next()`, where no time is counted
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
            timings.append(stopwatch.read(spent))
            finish = step.finish or finish
            traces.append(tracer.read(step) if tracer else ())
            watch(step, timings[-1], traces[-1])
    except KeyboardInterrupt:
        finish = FinishReason.INTERRUPTED
        seconds += 0.0 if began is None else clock() - began
    return Generation(tuple(made), seconds, first, finish, tuple(timings), tuple(traces) if tracer else ())


def pooled(runs: Iterable[Generation]) -> Generation:
    """Several runs as one, for rates over all of them. The result has no timings."""
    runs = list(runs)
    steps = tuple(step for run in runs for step in run.steps)
    return Generation(steps, sum(run.seconds for run in runs), None, FinishReason.LENGTH)


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """The index of the first difference, or None if both are equal. If one is a prefix of the other, its length."""
    for index, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
