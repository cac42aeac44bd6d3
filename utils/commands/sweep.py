"""/sweep: runs the last prompt several times with each of several values of a setting, by every enabled strategy."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.repeated_runs import (
    PairedRun,
    Variant,
    announcement,
    median_text,
    range_text,
    repeat_figures,
    repeat_in_turns,
    then_findings,
)
from utils.commands.experiments.sweep_conclusion import conclusion
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.harness import Harness
from utils.comparison.last_prompt import LastPrompt
from utils.comparison.reports import Finding, Report, ReportEvent, shortened
from utils.comparison.speed_claims import interval_text, speedup_text
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import with_costs
from utils.config.setting_table import NGRAM_PARTS, SAMPLING_PARTS, setting_fields
from utils.errors import UserError, check_choice
from utils.metrics.results import Comparison, compare
from utils.text import count_of

REPEATS, MAX_REPEATS = 5, 100
HEADINGS = (
    "strategy",
    "tokens/s",
    "range",
    "speed-up",
    "95 % interval",
    "acceptance",
    "tokens/forward",
    "text",
)
OPTIONAL = ("range", "95 % interval", "acceptance", "tokens/forward")
SETTINGS = ("gamma", "drafter_kind", "length", "processor", "seed", "verify", "cache")
# Parts of settings by their last words: temperature, top_k, top_p, order, ...
PARTS = {part.name.removeprefix("ngram "): part for part in (*SAMPLING_PARTS, *NGRAM_PARTS) if not part.is_switch}
EXAMPLES = "/sweep gamma 0 2 4, /sweep temperature 0.5 1 x9 (nine repeats), or /sweep processor greedy, nucleus 0.8 0.9"


def _sweep(argument: str, context: CommandContext) -> Outcome:
    name, _, text = argument.partition(" ")
    text, repeats = _repeats(text)
    # Values with blanks, such as `nucleus 0.8 0.9`, need commas; others may use blanks.
    words = [value.strip() for value in (text.split(",") if "," in text else text.split()) if value.strip()]
    if not words:
        raise UserError(f"give a setting and values, for example: {EXAMPLES}.")
    check_choice(name, (*SETTINGS, *PARTS), "setting that can be swept")
    last, harness = context.harness.last(), context.harness
    variants = [_variant(name, word, context) for word in words]
    for variant in variants:
        harness.enabled(variant.settings)  # refuse a value that cannot run before anything runs
    events = _events(harness, last, variants, repeats=repeats)
    title = f'/sweep {name}, {count_of(repeats, "repeat")} of "{shortened(last.text)}"'
    report = Report("sweep", last.text, context.settings, (name, *HEADINGS), events, _conclusion, charts=_charts)
    return [RunReport(replace(report, title=title, optional=OPTIONAL))]


def _repeats(text: str) -> tuple[str, int]:
    """The values without the `xN` at their end, and N."""
    values, count = re.fullmatch(r"(.*?)(?:[\s,]*\bx(\S+))?\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
    return values, WholeRange(1, MAX_REPEATS).parse(count) if count else REPEATS


def _variant(name: str, word: str, context: CommandContext) -> Variant:
    """The settings with one value. Raises UserError if the value is not valid."""
    entry = PARTS.get(name) or setting_fields()[name]
    settings = entry.change(context.settings, word, context.limits)
    return Variant(settings, f"{name} {word if name in PARTS else entry.show(settings)}")


def _events(harness: Harness, last: LastPrompt, variants: Sequence[Variant], *, repeats: int) -> Iterator[ReportEvent]:
    yield announcement(repeats, (variant.label for variant in variants))
    # Costs of drafters that the session has not used yet are measured before any run is timed.
    variants = [replace(variant, settings=with_costs(harness, variant.settings)) for variant in variants]
    yield from then_findings(
        repeat_in_turns(harness, last, variants, repeats=repeats), lambda: _findings(harness, variants)
    )


def _findings(harness: Harness, variants: Sequence[Variant]) -> Iterator[Finding]:
    texts: dict[tuple[int, ...], int] = {}  # the number of each different text
    for index, variant in enumerate(variants):
        for strategy in harness.enabled(variant.settings):
            if runs := variant.runs.get(strategy.name):
                figures = repeat_figures(strategy, runs) | _run_figures(strategy, runs)
                figures["text_number"] = texts.setdefault(tuple(runs[0].run.tokens), len(texts))
                # Two typed values may have the same label, so the chart needs the index.
                figures |= {"setting": variant.label, "place": index}
                yield Finding(_cells(figures, compare(runs[0].run, runs[0].target)), figures)


def _run_figures(strategy: Strategy, runs: Sequence[PairedRun]) -> dict[str, Any]:
    """The figures that do not change between repeats: drafts, acceptance, and whether the text equals the target's."""
    run = runs[0].run
    same = [compare(paired.run, paired.target).same for paired in runs] if strategy.lossless else [None]
    return {
        "drafted": run.drafted,
        "accepted": run.accepted,
        "lossless": strategy.lossless,
        "same_as_target": None if None in same else all(same),
    }


def _cells(row: dict[str, Any], comparison: Comparison) -> tuple[str, ...]:
    per_forward = row["tokens_per_target_forward"]
    return (
        row["setting"].partition(" ")[2],
        row["strategy"],
        median_text(row["tokens_per_second"], "{:.1f}"),
        range_text(row["tokens_per_second"]),
        speedup_text(row),
        interval_text(row["interval"]),
        f"{row['accepted'] / row['drafted']:.3f}" if row["drafted"] else "-",
        f"{per_forward:.2f}" if per_forward else "-",
        comparison.text if row["lossless"] else "-",
    )


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    return conclusion([finding.figures for finding in findings])


def _charts(findings: Sequence[Finding]) -> list[DotChart]:
    """A row for each value and strategy, the values of a strategy next to each other."""
    rows = sorted((finding.figures for finding in findings), key=lambda row: str(row["strategy"]))
    return [repeats_chart([(f"{row['setting']}, {row['strategy']}", row) for row in rows])]


SWEEP = Command(
    "sweep",
    "NAME VALUE ...",
    "one setting over several values",
    _sweep,
    group="checks",
    page=Page(
        f"Run the last prompt N times (default {REPEATS}) with each value of a setting, in turns. Commas separate "
        "values of several words.",
        ("> /sweep gamma 2 4 8", "gamma 4   1.52x target-only"),
        ("/sweep NAME VALUE VALUE ... [xN]", "/sweep temperature 0.5 1 x5", "/sweep processor greedy, nucleus 0.8 0.9"),
        ("race", "whatif"),
    ),
    words=(*SETTINGS, *PARTS),
)
