"""/race: runs the last prompt, or the prompts of a file, several times with every enabled strategy in turns, to
separate differences in speed from noise.
"""

import re
from collections.abc import Iterator, Sequence
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
from utils.commands.experiments.server_race import server_race
from utils.commands.experiments.suite import suite
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.harness import Harness
from utils.comparison.last_prompt import LastPrompt
from utils.comparison.reports import Finding, Report, ReportEvent, shortened
from utils.comparison.speed_claims import FASTER, TOO_FEW, Row, interval_text, speed_sentence, speedup_text
from utils.comparison.strategies import Strategy
from utils.config.settings import Settings
from utils.errors import UserError
from utils.prompts.prompt_files import Prompt

REPEATS, MAX_REPEATS = 5, 1000
HEADINGS = (
    "strategy",
    "tokens/s",
    "range",
    "time to first token",
    "decoding",
    "speed-up",
    "95 % interval",
    "verdict",
)
OPTIONAL = ("decoding", "time to first token", "range")
NO_TARGET = "Nothing to compare with: /target on adds speed-ups."
WITH_FASTER = "Next: /whatif predicts other values of /gamma, and /race 3 FILE measures your own prompts."
WITHOUT_FASTER = "Next: /why shows what limits the speed-up."


def _race(argument: str, context: CommandContext) -> Outcome:
    repeats, file, limit = _parsed(argument)
    if file or limit is not None:
        return suite(file, repeats or 1, context, limit=limit)
    repeats, harness = repeats or REPEATS, context.harness
    last = harness.state.last
    if last is None or not harness.state.servers or not any(arm.strategy is None for arm, _ in last.planned):
        return _local(repeats, context)
    title = f'/race {repeats} of "{shortened(last.text)}"'
    prompts = [(1, Prompt(last.text))]
    on_servers = RunReport(server_race(harness, context.settings, prompts, repeats=repeats, title=title))
    runs_locally = harness.runs_locally(context.settings) and last.is_local
    return [*(_local(repeats, context) if runs_locally else ()), on_servers]


def _local(repeats: int, context: CommandContext) -> Outcome:
    """The report of the local strategies."""
    last, harness, settings = context.harness.last(), context.harness, context.settings
    enabled = harness.enabled(settings)  # raises UserError where nothing is enabled
    title = f'/race {repeats} of "{shortened(last.text)}"'
    events = _events(harness, last, settings, enabled=enabled, repeats=repeats)
    report = Report(
        "race", last.text, settings, HEADINGS, events, _conclusion, charts=_charts, optional=OPTIONAL, title=title
    )
    return [RunReport(report)]


def _limited(argument: str) -> tuple[str, int | None]:
    """The argument without limit=N, which may be its first or last word, and N or None."""
    match = re.fullmatch(r"(?:limit=(\S*)\s*)?(.*?)(?:(?:^|\s+)limit=(\S*))?", argument.strip(), re.DOTALL)
    assert match is not None  # the pattern matches every argument
    first, file, last = match.groups()
    number = last if first is None else first
    try:
        return file, None if number is None else WholeRange(1).parse(number)
    except UserError as error:
        raise UserError(f"limit: {error}") from error


def _parsed(argument: str) -> tuple[int | None, str, int | None]:
    """The number of repeats or None, the file or an empty text, and the limit or None.

    A first word that begins like a number must be a valid number.
    """
    match = re.fullmatch(r"([-+.]?\d\S*)?\s*(.*)", argument, re.DOTALL)
    assert match is not None  # the pattern matches every argument
    number, file = match.groups("")
    return WholeRange(1, MAX_REPEATS).parse(number) if number else None, *_limited(file)


def _events(
    harness: Harness, last: LastPrompt, settings: Settings, *, enabled: Sequence[Strategy], repeats: int
) -> Iterator[ReportEvent]:
    variant = Variant(settings)
    yield announcement(repeats, (strategy.name for strategy in enabled))
    yield from then_findings(
        repeat_in_turns(harness, last, [variant], repeats=repeats),
        lambda: (_finding(strategy, runs) for strategy in enabled if (runs := variant.runs.get(strategy.name))),
    )


def _finding(strategy: Strategy, runs: Sequence[PairedRun]) -> Finding:
    figures = repeat_figures(strategy, runs)
    first = median(seconds or 0.0 for seconds in figures["first_token_seconds"])
    cells = (
        strategy.name,
        median_text(figures["tokens_per_second"], "{:.1f}"),
        range_text(figures["tokens_per_second"]),
        f"{1000 * first:.0f} ms",
        median_text(figures["decode_tokens_per_second"], "{:.1f}"),
        speedup_text(figures),
        interval_text(figures["interval"]),
        figures["verdict"],
    )
    return Finding(cells, figures)


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    return conclusion([finding.figures for finding in findings])


def conclusion(rows: Sequence[Row]) -> list[str]:
    """What the repeats show about each strategy, and what to do next."""
    if all(row["speedup"] is None for row in rows):
        return [NO_TARGET]
    lines = [sentence for row in rows if (sentence := speed_sentence(row))]
    verdicts = {row["verdict"] for row in rows}
    if TOO_FEW in verdicts:
        return [*lines, f"Next: /race {REPEATS} tells whether the difference is real."]
    return [*lines, WITH_FASTER if FASTER in verdicts else WITHOUT_FASTER]


def _charts(findings: Sequence[Finding]) -> list[DotChart]:
    return [repeats_chart([(finding.figures["strategy"], finding.figures) for finding in findings])]


RACE = Command(
    "race",
    "[N] [FILE]",
    "is the difference real? N runs of each",
    _race,
    group="does it help?",
    rank=2,
    page=Page(
        f"Run the last prompt N times (default {REPEATS}) with every strategy that is on, in turns, and say whether "
        "the differences in speed are larger than the noise. With a FILE, run each of its prompts N times (default 1) "
        "and report by task. A file has one prompt per line, or JSON lines. One of Spec-Bench or "
        "SPEED-Bench also gets the table of that benchmark.",
        ("> /race 5", "speculative is faster: 1.52x target-only (95 % interval 1.41 to 1.63)."),
        syntax=(
            "/race N               the last prompt, N times",
            "/race N FILE          all prompts of a file, N times",
            "/race N FILE limit=3  3 prompts of each task of the file",
        ),
        see_also=("verdict", "sweep", "why", "speed-up"),
    ),
    files=("",),
)
