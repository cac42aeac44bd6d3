"""/sweep: the last prompt with one value of a setting after the other, by every strategy, in turns, several times."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from utils.commands.experiments.race import ENOUGH, Heat, figures_of, in_turns, run_last, spread
from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Bench, Last
from utils.comparison.reports import Chart, Finding, Progress, Report, time_left
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import briefly, measured
from utils.config.settings import Settings, changed, setting_fields, shown
from utils.config.value_types import Limits, Whole
from utils.errors import UserError, one_of
from utils.metrics.results import compare

REPEATS, MOST = 3, 100
HEADINGS = (
    "setting",
    "strategy",
    "tokens/s",
    "lowest - highest",
    "decoding",
    "speed-up",
    "acceptance",
    "per forward",
    "text",
)
SETTINGS = (
    "gamma",
    "drafter_kind",
    "length",
    "processor",
    "seed",
    "verify",
    "cache",
    "set_ngramstorage",
    "top_k_filler",
)
PARTS = {"temperature": "processor", "order": "set_ngramstorage"}  # of a setting
EXAMPLES = "/sweep gamma 0 2 4, /sweep temperature 0.5 1 x5 (five repeats), or /sweep processor greedy, nucleus 0.8 0.9"


@dataclass(frozen=True, slots=True)
class Value:
    """One of those that are swept over: its place, how it is called, and the settings with it. heats: by the strategy's name."""

    place: int
    label: str
    settings: Settings
    heats: dict[str, list[Heat]] = field(default_factory=dict)


def _sweep(argument: str, situation: Situation) -> Outcome:
    name, _, given = argument.partition(" ")
    given, repeats = _repeats(given, situation.limits)
    words = [value.strip() for value in (given.split(",") if "," in given else given.split()) if value.strip()]
    if not words:
        raise UserError(f"give a setting and values, for example: {EXAMPLES}.")
    one_of(name, (*SETTINGS, *PARTS), "setting that can be swept")
    last, bench = situation.bench.last(), situation.bench
    values = [_value(place, name, word, situation) for place, word in enumerate(words)]
    for value in values:
        bench.enabled(value.settings)  # refused before anything is run
    events = _swept(bench, last, values, repeats)
    return Outcome(report=Report("sweep", last.text, situation.settings, HEADINGS, events, _conclusion, chart=_chart))


def _repeats(given: str, limits: Limits) -> tuple[str, int]:
    """The values, and the number behind an x at the end."""
    values, count = re.fullmatch(r"(.*?)(?:[\s,]*\bx(\S+))?\s*", given, re.DOTALL).groups()  # type: ignore[union-attr]
    return values, Whole(1, MOST).parse(count, REPEATS, limits) if count else REPEATS


def _value(place: int, name: str, word: str, situation: Situation) -> Value:
    """Raises UserError for a word that is none."""
    settings, entry = situation.settings, setting_fields()[PARTS.get(name, name)]
    text = word
    if name in PARTS:
        kind, *rest = shown(settings, entry).split()
        text = " ".join(["multinomial" if kind == "greedy" else kind, word, *rest[1:]])
    made = changed(settings, entry, text, situation.limits)
    return Value(place, f"{name} {word if name in PARTS else shown(made, entry)}", made)


def _swept(bench: Bench, last: Last, values: Sequence[Value], repeats: int) -> Iterator[Progress | Finding]:
    yield Progress(
        f"warming up, then {repeats} repeat{'s' * (repeats > 1)} of {', '.join(value.label for value in values)} ..."
    )
    values = [
        replace(value, settings=measured(bench, value.settings)) for value in values
    ]  # drafters that were not asked for before
    for value in values:
        for strategy in bench.enabled(value.settings):
            run_last(bench, last, strategy, briefly(value.settings))
    spent, done = 0.0, 0
    try:
        for repeat in range(repeats):
            for value in in_turns(values, repeat):
                if done:
                    yield Progress(
                        f"{value.label}, {repeat + 1} of {repeats}{time_left(spent, done, repeats * len(values))} ..."
                    )
                spent, done = spent + _heat(bench, last, value, repeat), done + 1
    finally:  # Ctrl-C goes on once this has been taken
        yield from _findings(bench, values)


def _heat(bench: Bench, last: Last, value: Value, repeat: int) -> float:
    """Seconds that a run by each strategy took."""
    chosen = bench.enabled(value.settings)
    runs = {strategy.name: run_last(bench, last, strategy, value.settings) for strategy in in_turns(chosen, repeat)}
    target = next((runs[strategy.name] for strategy in chosen if strategy.is_baseline), None)
    for name, run in runs.items():
        value.heats.setdefault(name, []).append(Heat(run, target))
    return sum(run.seconds for run in runs.values())


def _findings(bench: Bench, values: Sequence[Value]) -> Iterator[Finding]:
    for value in values:
        for strategy in bench.enabled(value.settings):
            if heats := value.heats.get(strategy.name):
                yield _finding(value, strategy, heats)


def _finding(value: Value, strategy: Strategy, heats: Sequence[Heat]) -> Finding:
    run, figures = heats[0].run, figures_of(strategy.name, heats)
    same = [compare(heat.run, heat.target).same for heat in heats] if strategy.lossless else [None]
    told = None if None in same else all(same)
    ups, decode = figures["speedups"], figures["decode_tokens_per_second"]
    more: dict[str, Any] = {
        "setting": value.label,
        "place": value.place,
        "drafted": run.drafted,
        "accepted": run.accepted,
        "tokens_per_target_forward": run.tokens_per_target_forward,
        "same_as_target": told,
    }
    cells = (
        value.label,
        strategy.name,
        f"{median(figures['tokens_per_second']):.1f}",
        spread(figures["tokens_per_second"], ".1f"),
        f"{median(decode):.1f}" if decode else "-",
        f"{median(ups):.2f}x" if ups else "-",
        "-" if run.acceptance_rate is None else f"{run.accepted}/{run.drafted} = {run.acceptance_rate:.3f}",
        f"{run.tokens_per_target_forward:.2f}" if strategy.uses_target and run.tokens_per_target_forward else "-",
        {None: "-", True: "same", False: "another"}[told],
    )
    return Finding(cells, figures | more)


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    rows = [finding.figures for finding in findings]
    best = max(rows, key=lambda row: median(row["tokens_per_second"]))
    told = f", {median(best['speedups']):.2f}x target-only there" if best["speedups"] else ""
    lines = [f"fastest: {_named(best)}, {median(best['tokens_per_second']):.1f} tokens/s{told}"]
    near = [
        _named(row)
        for row in rows
        if row is not best and max(row["tokens_per_second"]) >= min(best["tokens_per_second"])
    ]
    lines += [f"within noise of it: {', '.join(near)}"] if near else []
    return [
        *lines,
        f"Medians; speed-ups are taken within each repeat. {ENOUGH} repeats (x{ENOUGH}) or more tell small differences apart.",
    ]


def _named(row: dict[str, Any]) -> str:
    return f"{row['strategy']} with {row['setting']}"


def _chart(findings: Sequence[Finding]) -> Chart:
    """Over the values in the order given, one that was given twice twice; where a strategy did not run there is no point."""
    rows = [finding.figures for finding in findings]
    places = max(row["place"] for row in rows) + 1
    name = rows[0]["setting"].partition(" ")[0]
    series: dict[str, list[float | None]] = {row["strategy"]: [None] * places for row in rows}
    ticks = [""] * places
    for row in rows:
        series[row["strategy"]][row["place"]] = median(row["tokens_per_second"])
        ticks[row["place"]] = row["setting"].removeprefix(f"{name} ")
    return Chart(series, "tokens/s", name, ticks)


SWEEP = Command(
    "sweep",
    "NAME VALUE ... [xN]",
    f"the last prompt with each value of a setting, N times ({REPEATS})",
    _sweep,
    words=(*SETTINGS, *PARTS),
)
