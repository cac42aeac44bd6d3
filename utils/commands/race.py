"""/race and /sweep: the last prompt again and again, strategies in turns, or with one setting after the other.

What runs first, and what else the machine does, differs from run to run; so every repeat begins with another strategy, speeds are compared
within a repeat, and a difference that not all repeats agree on is called noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from utils.bench import Bench, Last, run_alone
from utils.commands.registry import Command, Outcome, Situation
from utils.errors import UserError, one_of
from utils.kinds import Whole
from utils.preparing import measured
from utils.reports import Chart, Finding, Progress, Report, time_left
from utils.results import Generation, compare
from utils.settings import Settings, changed, setting_fields, shown
from utils.strategies import Strategy

REPEATS, MOST = 5, 1000
ENOUGH = 5  # repeats that must agree: by chance alone they do once in 16
HEADINGS = ("strategy", "runs", "tokens/s", "lowest - highest", "before decoding", "decoding", "speed-up", "verdict")
SWEPT = ("setting", "strategy", "tokens/s", "speed-up", "accepted", "rate", "per forward", "text")
SWEEPABLE = ("gamma", "drafter_kind", "length", "processor", "seed", "verify", "cache", "set_ngramstorage", "top_k_filler")


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
    events = _heats(bench, last, settings, bench.enabled(settings), repeats)
    return Outcome(report=Report("race", last.text, settings, HEADINGS, events, _verdicts, chart=_chart))


def _heats(bench: Bench, last: Last, settings: Settings, chosen: Sequence[Strategy], repeats: int) -> Iterator[Progress | Finding]:
    heats: dict[str, list[Heat]] = {strategy.name: [] for strategy in chosen}
    yield Progress(f"warming up, then {repeats} repeats of {', '.join(heats)} ...")
    for strategy in chosen:
        _run(bench, last, strategy, replace(settings, length=min(settings.length, 4)))
    spent = 0.0
    try:
        for repeat in range(repeats):
            if repeat:
                yield Progress(f"{repeat} of {repeats}{time_left(spent, repeat, repeats)} ...")
            order = [chosen[(place + repeat) % len(chosen)] for place in range(len(chosen))]
            runs = {strategy.name: _run(bench, last, strategy, settings) for strategy in order}
            target = next((runs[strategy.name] for strategy in chosen if strategy.is_baseline), None)
            for name, run in runs.items():
                heats[name].append(Heat(run, target))
                spent += run.seconds
    finally:  # Ctrl-C goes on once this has been taken
        yield from (_heat(name, found) for name, found in heats.items() if found)


def _run(bench: Bench, last: Last, strategy: Strategy, settings: Settings) -> Generation:
    return run_alone(bench, last.job.prompt, strategy, settings, history=last.job.history)


def _heat(name: str, heats: Sequence[Heat]) -> Finding:
    speeds, ups = [heat.speed for heat in heats], [heat.speedup for heat in heats if heat.speedup is not None]
    decode = [heat.decode for heat in heats if heat.decode is not None]
    first = median(heat.run.first_seconds or 0.0 for heat in heats)
    told = verdict(ups)
    figures: dict[str, Any] = {
        "strategy": name,
        "tokens_per_second": speeds,
        "speedups": ups,
        "decode_tokens_per_second": decode,
        "first_token_seconds": [heat.run.first_seconds for heat in heats],
        "verdict": told,
    }
    spread = f"{min(speeds):.1f} - {max(speeds):.1f}"
    fast = f"{median(decode):.1f}/s" if decode else "-"
    up = f"{median(ups):.2f}x" if ups else "-"
    return Finding((name, str(len(heats)), f"{median(speeds):.1f}", spread, f"{1000 * first:.0f} ms", fast, up, told), figures)


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


def _sweep(argument: str, situation: Situation) -> Outcome:
    name, _, given = argument.partition(" ")
    values = [value.strip() for value in (given.split(",") if "," in given else given.split()) if value.strip()]
    entries = setting_fields()
    if not values:
        raise UserError("give a setting and values, for example: /sweep gamma 0 2 4, or /sweep processor greedy, nucleus 0.8 0.9")
    one_of(name, SWEEPABLE, "setting that can be swept")
    chosen = [changed(situation.settings, entries[name], value, situation.limits) for value in values]
    last, bench = situation.bench.last(), situation.bench
    for settings in chosen:
        bench.enabled(settings)  # refused before anything is run
    events = _swept(bench, last, name, chosen)
    return Outcome(report=Report("sweep", last.text, situation.settings, SWEPT, events, _swept_end, chart=_swept_chart))


def _swept(bench: Bench, last: Last, name: str, chosen: Sequence[Settings]) -> Iterator[Progress | Finding]:
    entry = setting_fields()[name]
    for settings in chosen:
        label = f"{name} {shown(settings, entry)}"
        yield Progress(f"{label} ...")
        settings = measured(bench, settings)  # of drafters that were not asked for before
        runs = [(strategy, _run(bench, last, strategy, settings)) for strategy in bench.enabled(settings)]
        target = next((run for strategy, run in runs if strategy.is_baseline), None)
        for strategy, run in runs:
            heat, same = Heat(run, target), compare(run, target).same if strategy.lossless else None
            figures = {
                "setting": label,
                "strategy": strategy.name,
                "tokens_per_second": heat.speed,
                "speedup": heat.speedup,
                "drafted": run.drafted,
                "accepted": run.accepted,
                "tokens_per_target_forward": run.tokens_per_target_forward,
                "same_as_target": same,
            }
            rate = "-" if run.acceptance_rate is None else f"{run.acceptance_rate:.3f}"
            up = "-" if heat.speedup is None else f"{heat.speedup:.2f}x"
            per = f"{run.tokens_per_target_forward:.2f}" if strategy.uses_target and run.tokens_per_target_forward else "-"
            text = {None: "-", True: "same", False: "another"}[same]
            cells = (label, strategy.name, f"{heat.speed:.1f}", up, f"{run.accepted}/{run.drafted}", rate, per, text)
            yield Finding(cells, figures)


def _swept_end(findings: Sequence[Finding]) -> list[str]:
    rows = [finding.figures for finding in findings if finding.figures["speedup"] is not None]
    best = max(rows, key=lambda row: float(row["speedup"]), default=None)
    told = [f"best: {best['strategy']} with {best['setting']}, {best['speedup']:.2f}x"] if best else []
    return [*told, "One run each: /race repeats what looks good."]


def _swept_chart(findings: Sequence[Finding]) -> Chart:
    rows = [finding.figures for finding in findings]
    series: dict[str, list[float]] = {}
    for row in rows:
        series.setdefault(row["strategy"], []).append(row["tokens_per_second"])
    name = rows[0]["setting"].partition(" ")[0]
    ticks = list(dict.fromkeys(row["setting"].removeprefix(f"{name} ") for row in rows))
    return Chart(series, "tokens/s", name, ticks)


RACE = Command("race", "[N]", f"the last prompt N times by every strategy that is on, in turns, with a verdict (N: {REPEATS})", _race)
SWEEP = Command("sweep", "NAME VALUE ...", "the last prompt with one value of a setting after the other", _sweep, words=SWEEPABLE)
