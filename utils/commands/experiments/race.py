"""/race: the last prompt again and again, strategies in turns.

What runs first, and what else the machine does, differs from run to run; so every repeat begins with another strategy, speeds are compared
within a repeat, and a difference that not all repeats agree on is called noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Bench, Last, run_alone
from utils.comparison.reports import Chart, Finding, Progress, Report, time_left
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import briefly
from utils.config.settings import Settings
from utils.config.value_types import Whole
from utils.metrics.results import Generation, compare

Row = TypeVar("Row")
REPEATS, MOST = 5, 1000
ENOUGH = 5  # repeats that must agree: by chance alone they do once in 16
HEADINGS = ("strategy", "runs", "tokens/s", "lowest - highest", "before decoding", "decoding", "speed-up", "verdict")


@dataclass(frozen=True, slots=True)
class Heat:
    """One run of a repeat, and the target's of the same repeat."""

    run: Generation
    target: Generation | None

    @property
    def speed(self) -> float:
        return self.run.tokens_per_second or 0.0

    @property
    def speedup(self) -> float | None:
        return compare(self.run, self.target).speedup

    @property
    def decode(self) -> float | None:
        """Tokens per second behind the first step."""
        first = len(self.run.steps[0].tokens) if self.run.steps else 0
        seconds = self.run.seconds - (self.run.first_seconds or 0.0)
        return (len(self.run.tokens) - first) / seconds if seconds > 0 and len(self.run.tokens) > first else None


def _race(argument: str, situation: Situation) -> Outcome:
    repeats: int = Whole(1, MOST).parse(argument or str(REPEATS), REPEATS, situation.limits)
    last, bench, settings = situation.bench.last(), situation.bench, situation.settings
    events = _heats(bench, last, settings, bench.enabled(settings), repeats=repeats)
    return Outcome(report=Report("race", last.text, settings, HEADINGS, events, _verdicts, chart=_chart))


def _heats(
    bench: Bench, last: Last, settings: Settings, chosen: Sequence[Strategy], *, repeats: int
) -> Iterator[Progress | Finding]:
    heats: dict[str, list[Heat]] = {strategy.name: [] for strategy in chosen}
    yield Progress(f"warming up, then {repeats} repeat{'s' * (repeats > 1)} of {', '.join(heats)} ...")
    for strategy in chosen:
        run_last(bench, last, strategy, briefly(settings))
    spent = 0.0
    try:
        for repeat in range(repeats):
            if repeat:
                yield Progress(f"{repeat} of {repeats}{time_left(spent, repeat, repeats)} ...")
            runs = {strategy.name: run_last(bench, last, strategy, settings) for strategy in in_turns(chosen, repeat)}
            target = next((runs[strategy.name] for strategy in chosen if strategy.is_baseline), None)
            for name, run in runs.items():
                heats[name].append(Heat(run, target))
                spent += run.seconds
    finally:  # Ctrl-C goes on once this has been taken
        yield from (_heat(name, found) for name, found in heats.items() if found)


def in_turns(row: Sequence[Row], repeat: int) -> list[Row]:
    """The same, begun with another one in every repeat."""
    return [row[(place + repeat) % len(row)] for place in range(len(row))]


def run_last(bench: Bench, last: Last, strategy: Strategy, settings: Settings) -> Generation:
    """The last prompt once more, on a storage of its own. Ctrl-C ends it all."""
    return run_alone(bench, last.job.prompt, strategy, settings, history=last.job.history)


def figures_of(name: str, heats: Sequence[Heat]) -> dict[str, Any]:
    """What several runs of a strategy came to."""
    ups = [heat.speedup for heat in heats if heat.speedup is not None]
    return {
        "strategy": name,
        "tokens_per_second": [heat.speed for heat in heats],
        "speedups": ups,
        "decode_tokens_per_second": [heat.decode for heat in heats if heat.decode is not None],
        "first_token_seconds": [heat.run.first_seconds for heat in heats],
        "verdict": verdict(ups),
    }


def spread(values: Sequence[float], form: str) -> str:
    """The lowest and the highest."""
    return f"{min(values):{form}} - {max(values):{form}}"


def _heat(name: str, heats: Sequence[Heat]) -> Finding:
    figures = figures_of(name, heats)
    speeds, ups, decode = figures["tokens_per_second"], figures["speedups"], figures["decode_tokens_per_second"]
    first = median(seconds or 0.0 for seconds in figures["first_token_seconds"])
    fast = f"{median(decode):.1f}/s" if decode else "-"
    up = f"{median(ups):.2f}x" if ups else "-"
    cells = (
        name,
        str(len(heats)),
        f"{median(speeds):.1f}",
        spread(speeds, ".1f"),
        f"{1000 * first:.0f} ms",
        fast,
        up,
        figures["verdict"],
    )
    return Finding(cells, figures)


def verdict(ups: Sequence[float]) -> str:
    """What speed-ups of several repeats come to."""
    if not ups:
        return "-"
    if all(up == 1 for up in ups):
        return "the baseline"
    if len(ups) < ENOUGH:
        return f"{ENOUGH} repeats tell more"
    if min(ups) > 1:
        return "faster"
    return "slower" if max(ups) < 1 else "within noise"


def _verdicts(findings: Sequence[Finding]) -> list[str]:
    return [
        "Medians. Speed-ups are taken within each repeat; 'within noise': the repeats do not agree on which is faster. "
        "Before decoding: prefill, and the first round."
    ]


def _chart(findings: Sequence[Finding]) -> Chart:
    series = {finding.figures["strategy"]: finding.figures["tokens_per_second"] for finding in findings}
    ticks = [str(place + 1) for place in range(max(map(len, series.values())))]
    return Chart(series, "tokens/s", "repeat", ticks)


RACE = Command(
    "race",
    "[N]",
    f"the last prompt N times by every strategy that is on, in turns, with a verdict (N: {REPEATS})",
    _race,
)
