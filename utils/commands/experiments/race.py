"""/race: runs the last prompt several times with every enabled strategy, and tells differences in speed from noise."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

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
from utils.commands.outcomes import Outcome, RunReport
from utils.commands.registry import Command, CommandContext, Page
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.harness import Harness
from utils.comparison.last_prompt import LastPrompt
from utils.comparison.reports import Finding, Report, ReportEvent
from utils.config.settings import Settings

REPEATS, MAX_REPEATS = 5, 1000
HEADINGS = (
    "strategy",
    "runs",
    "tokens/s",
    "lowest - highest",
    "time to first token",
    "decoding",
    "speed-up",
    "verdict",
)


def _race(argument: str, context: CommandContext) -> Outcome:
    repeats = WholeRange(1, MAX_REPEATS).parse(argument or str(REPEATS))
    last, harness, settings = context.harness.last(), context.harness, context.settings
    names = [strategy.name for strategy in harness.enabled(settings)]  # raises UserError where nothing is enabled
    events = _events(harness, last, settings, names=names, repeats=repeats)
    return [RunReport(Report("race", last.text, settings, HEADINGS, events, _conclusion, charts=_charts))]


def _events(
    harness: Harness, last: LastPrompt, settings: Settings, *, names: Iterable[str], repeats: int
) -> Iterator[ReportEvent]:
    variant = Variant(settings)
    yield announcement(repeats, names)
    yield from then_findings(
        repeat_in_turns(harness, last, [variant], repeats=repeats),
        lambda: (_finding(name, runs) for name, runs in variant.runs.items()),
    )


def _finding(name: str, runs: Sequence[PairedRun]) -> Finding:
    figures = repeat_figures(name, runs)
    first = median(seconds or 0.0 for seconds in figures["first_token_seconds"])
    cells = (
        name,
        str(len(runs)),
        median_text(figures["tokens_per_second"], "{:.1f}"),
        range_text(figures["tokens_per_second"]),
        f"{1000 * first:.0f} ms",
        median_text(figures["decode_tokens_per_second"], "{:.1f}/s"),
        median_text(figures["speedups"], "{:.2f}x"),
        figures["verdict"],
    )
    return Finding(cells, figures)


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    return [
        "Medians. Speed-ups are computed within each repeat. 'Within noise' means that the repeats do not agree on "
        "which is faster. The time to first token includes the prefill and the first round."
    ]


def _charts(findings: Sequence[Finding]) -> list[DotChart]:
    return [repeats_chart([(finding.figures["strategy"], finding.figures) for finding in findings])]


RACE = Command(
    "race",
    "[N]",
    "is the difference real? N runs of each",
    _race,
    group="does it help?",
    rank=2,
    page=Page(
        f"Run the last prompt N times (default {REPEATS}) with every strategy that is on, in turns, and say whether "
        "the differences in speed are larger than the noise.",
        ("> /race 5", "speculative   1.52x target-only"),
        see_also=("verdict", "sweep", "why", "speed-up"),
    ),
)
