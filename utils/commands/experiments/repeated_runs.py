"""Repeated, interleaved runs for /race, /sweep and /replay.

The speed of a machine drifts. So every variant is warmed up first, variants and strategies take turns at going first,
and speeds are compared within a repeat only. Ctrl-C keeps finished repeats. The commands decide what is measured and
shown.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from utils.comparison.harness import Harness
from utils.comparison.last_prompt import LastPrompt
from utils.comparison.reports import Finding, Progress, ReportEvent
from utils.comparison.speed_claims import SpeedClaim
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import shortened
from utils.config.settings import Settings
from utils.metrics.results import Generation, compare, pooled
from utils.text import count_of

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class PairedRun:
    """One run of a repeat, with the target's own run of the same repeat if the target is on.

    `turns` are those of a conversation. Their tokens, seconds and drafts are added up.
    """

    run: Generation
    target: Generation | None
    turns: tuple["PairedRun", ...] = ()

    @classmethod
    def of_turns(cls, runs: Sequence[Generation], targets: Sequence[Generation]) -> "PairedRun":
        """All turns of a conversation as one run."""
        pairs = tuple(map(cls, runs, targets))
        return pairs[0] if len(pairs) == 1 else cls(pooled(runs), pooled(targets), pairs)

    @property
    def each(self) -> tuple["PairedRun", ...]:
        """The turns, or the run itself if there is only one."""
        return self.turns or (self,)

    @property
    def tokens_per_second(self) -> float:
        return self.run.tokens_per_second or 0.0

    @property
    def speedup(self) -> float | None:
        return compare(self.run, self.target).speedup

    @property
    def decode_tokens_per_second(self) -> float | None:
        return self.run.decode_tokens_per_second


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings to measure, and the finished runs by the strategy's name."""

    settings: Settings
    label: str = ""
    runs: dict[str, list[PairedRun]] = field(default_factory=dict)


@dataclass(slots=True)
class RemainingTime:
    """Estimates the remaining time of a series from its finished part."""

    finished: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.finished += 1
        self.seconds += seconds

    def estimate(self, remaining: int) -> str:
        """The end of a progress sentence. It is empty until a part is finished."""
        return f", about {self.seconds / self.finished * remaining:.0f} s left" if self.finished else ""


def announcement(repeats: int, names: Iterable[str]) -> Progress:
    """The first sentence of a series."""
    return Progress(f"warming up, then {count_of(repeats, 'repeat')} of {', '.join(names)} ...")


def repeat_in_turns(
    harness: Harness, last: LastPrompt, variants: Sequence[Variant], *, repeats: int
) -> Iterator[ReportEvent]:
    """Warm up, then run the last prompt `repeats` times with every variant, and add the runs to the variants.

    Each repeat starts with the next variant and the next strategy.
    """
    for variant in variants:
        # All variants first: a warm-up between timed runs would disturb the ones after it.
        for strategy in harness.enabled(variant.settings):
            run_last(harness, last, strategy, shortened(variant.settings))
    time = RemainingTime()
    for repeat in range(repeats):
        # The first run of a repeat finds the machine in a different state, so the first place rotates.
        for variant in rotated(variants, repeat):
            left = time.estimate(repeats * len(variants) - time.finished)
            label = f"{variant.label}, " if variant.label else ""
            yield Progress(f"{label}repeat {repeat + 1} of {repeats}{left} ...")
            time.add(_run_variant(harness, last, variant, repeat))


def _run_variant(harness: Harness, last: LastPrompt, variant: Variant, repeat: int) -> float:
    """Run every strategy once. Returns the seconds that this took."""
    enabled = harness.enabled(variant.settings)
    runs = {strategy.name: run_last(harness, last, strategy, variant.settings) for strategy in rotated(enabled, repeat)}
    target = next((runs[strategy.name] for strategy in enabled if strategy.is_baseline), None)
    # Only complete repeats are added, so Ctrl-C cannot leave a run without the target's run of its repeat.
    for name, run in runs.items():
        variant.runs.setdefault(name, []).append(PairedRun(run, target))
    return sum(run.seconds for run in runs.values())


def run_last(harness: Harness, last: LastPrompt, strategy: Strategy, settings: Settings) -> Generation:
    """Run the last prompt again with an n-gram storage of its own. Ctrl-C raises KeyboardInterrupt."""
    return harness.run_alone(last.job.prompt, strategy, settings, history=last.job.history)


def rotated(items: Sequence[Item], start: int) -> list[Item]:
    """All items in order, beginning at index `start` modulo their number."""
    return [items[(index + start) % len(items)] for index in range(len(items))]


def one_by_one(
    items: Sequence[Item],
    name: Callable[[Item], str],
    run: Callable[[int, Item], Generator[ReportEvent, None, float | None]],
) -> Iterator[ReportEvent]:
    """Run the items in order, with progress and the estimated time left.

    `run` takes an item and its index. It returns the seconds of its runs, or None if the item could not be run.
    """
    time = RemainingTime()
    for index, item in enumerate(items):
        left = time.estimate(len(items) - index)
        yield Progress(f"{index + 1} of {len(items)} ({name(item)}){left} ...")
        seconds = yield from run(index, item)
        if seconds is not None:
            time.add(seconds)


def then_findings(events: Iterator[ReportEvent], findings: Callable[[], Iterable[Finding]]) -> Iterator[ReportEvent]:
    """The events, followed by the findings of finished runs, even if Ctrl-C or an error ends the events."""
    try:
        yield from events
    finally:  # Ctrl-C is raised again once the findings are consumed
        yield from findings()


def repeat_figures(strategy: Strategy, runs: Sequence[PairedRun]) -> dict[str, Any]:
    """The figures of several runs of one strategy, as the JSON records have them."""
    speedups = [paired.speedup for paired in runs if paired.speedup is not None]
    decode = [paired.decode_tokens_per_second for paired in runs]
    return {
        "strategy": strategy.name,
        "tokens_per_second": [paired.tokens_per_second for paired in runs],
        "speedups": speedups,
        "decode_tokens_per_second": [speed for speed in decode if speed is not None],
        "first_token_seconds": [paired.run.first_seconds for paired in runs],
        "tokens_per_target_forward": runs[0].run.tokens_per_target_forward if strategy.uses_target else None,
        **claim_of(strategy, [speedups], runs[0].run).figures,
    }


def claim_of(strategy: Strategy, speedups: Sequence[Sequence[float]], run: Generation) -> SpeedClaim:
    """The claim for a strategy from the speed-ups of each prompt. `run` is one of its runs, or all of them as one."""
    # Only drafts can save forward passes, so tokens per forward mean nothing for other strategies.
    forwards = run.tokens_per_target_forward if strategy.drafts else None
    return SpeedClaim.of(speedups, baseline=strategy.is_baseline, tokens_per_forward=forwards)


def median_text(values: Sequence[float], form: str) -> str:
    """The median as `form` formats it, or a dash without values."""
    return form.format(median(values)) if values else "-"


def range_text(values: Sequence[float]) -> str:
    """The lowest and the highest speed, without decimals from 100 on."""
    form = ".1f" if max(values) < 100 else ".0f"
    return f"{min(values):{form}}-{max(values):{form}}"
