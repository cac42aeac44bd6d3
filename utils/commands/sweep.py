"""/sweep: runs the last prompt several times with each of several values of a setting, by every enabled strategy."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.paired_runs import local_arms
from utils.commands.experiments.race_figures import race_row, range_text, spread
from utils.commands.experiments.race_runs import ArmRace, RaceItem
from utils.commands.experiments.repeated_runs import then_findings
from utils.commands.experiments.sweep_conclusion import conclusion
from utils.commands.shared.columns import NOTHING, ResultTable, Row, TableColumn, figure, figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Report, ReportEvent, shortened
from utils.comparison.speed_claims import interval_text, speedup_text
from utils.comparison.warm_up import with_costs
from utils.config.setting_table import NGRAM_PARTS, SAMPLING_PARTS, setting_fields
from utils.config.settings import Settings
from utils.errors import UserError, check_choice
from utils.metrics.results import difference_text, first_difference
from utils.prompts.prompt_files import Prompt
from utils.text import count_of

REPEATS, MAX_REPEATS = 5, 100
SETTINGS = ("gamma", "drafter_kind", "length", "processor", "seed", "verify", "cache")
# Parts of settings by their last words: temperature, top_k, top_p, order, ...
PARTS = {part.name.removeprefix("ngram "): part for part in (*SAMPLING_PARTS, *NGRAM_PARTS) if not part.is_switch}
EXAMPLES = "/sweep gamma 0 2 4, /sweep temperature 0.5 1 x9 (nine repeats), or /sweep processor greedy, nucleus 0.8 0.9"


def sweep_table(setting: str) -> ResultTable:
    """The columns of a sweep; the first one has the values of the setting."""
    return ResultTable(
        TableColumn(setting, lambda row: row["setting"].partition(" ")[2]),
        figure("strategy", "strategy"),
        spread("tokens/s", "tokens_per_second", "{:.1f}"),
        TableColumn("range", lambda row: range_text(row["tokens_per_second"]), 1),
        TableColumn("speed-up", speedup_text),
        TableColumn("95 % interval", lambda row: interval_text(row["interval"]), 2),
        figure("acceptance", "acceptance_rate", "{:.3f}", drop=3),
        figure("tokens/forward", "tokens_per_target_forward", "{:.2f}", drop=4),
        TableColumn("text", _text),
    )


def _text(row: Row) -> str:
    compared = row["lossless"] and row["same_as_target"] is not None
    return difference_text(row["first_difference"]) if compared else NOTHING


def _sweep(argument: str, context: CommandContext) -> Outcome:
    name, _, text = argument.partition(" ")
    text, repeats = _repeats(text)
    # Values with blanks, such as `nucleus 0.8 0.9`, need commas; others may use blanks.
    words = [value.strip() for value in (text.split(",") if "," in text else text.split()) if value.strip()]
    if not words:
        raise UserError(f"give a setting and values, for example: {EXAMPLES}.")
    check_choice(name, (*SETTINGS, *PARTS), "setting that can be swept")
    last, harness = context.harness.last(), context.harness
    prompt = Prompt(last.text)
    # Arms of a value that cannot run are refused before anything runs.
    items = [
        RaceItem(1, prompt, label, settings, local_arms(harness, settings), last.job.history)
        for label, settings in (_value(name, word, context) for word in words)
    ]
    table = sweep_table(name)
    report = Report(
        *("sweep", last.text, context.settings, table.headings, _events(harness, items, table, repeats=repeats)),
        lambda findings: conclusion(figures_of(findings)),
        charts=_charts,
        optional=table.optional,
        title=f'/sweep {name}, {count_of(repeats, "repeat")} of "{shortened(last.text)}"',
    )
    return [RunReport(report)]


def _repeats(text: str) -> tuple[str, int]:
    """The values without the `xN` at their end, and N."""
    values, count = re.fullmatch(r"(.*?)(?:[\s,]*\bx(\S+))?\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
    return values, WholeRange(1, MAX_REPEATS).parse(count) if count else REPEATS


def _value(name: str, word: str, context: CommandContext) -> tuple[str, Settings]:
    """The label of a value, and the settings with it. Raises UserError if the value is not valid."""
    entry = PARTS.get(name) or setting_fields()[name]
    settings = entry.change(context.settings, word, context.limits)
    return f"{name} {word if name in PARTS else entry.show(settings)}", settings


def _events(harness: Harness, items: Sequence[RaceItem], table: ResultTable, *, repeats: int) -> Iterator[ReportEvent]:
    # Costs of drafters that the session has not used yet are measured before any run is timed.
    race = ArmRace(harness, [replace(item, settings=with_costs(harness, item.settings)) for item in items], repeats)
    yield from then_findings(race.events(), lambda: map(table.finding, _rows(race)))


def _rows(race: ArmRace) -> Iterator[dict[str, Any]]:
    texts: dict[tuple[int, ...], int] = {}  # the number of each different text
    # Two typed values may have the same label, so the chart needs the index.
    for index, item in enumerate(race.items):
        for arm in item.arms:
            group = [result for result in race.results if result.item is item and result.runs.arm is arm]
            if not group:
                continue
            first = group[0].runs
            tokens, theirs = (turns[0].tokens or () if turns else None for turns in (first.ours, first.theirs))
            same = [one.runs.same for one in group]
            yield race_row(item.group, group) | {
                "setting": item.group,
                "place": index,
                "text_number": texts.setdefault(tuple(tokens or ()), len(texts)),
                "same_as_target": None if None in same else all(same),
                "first_difference": None if theirs is None else first_difference(tokens or (), theirs),
            }


def _charts(findings: Sequence[Finding]) -> list[DotChart]:
    """A row for each value and strategy, the values of a strategy next to each other."""
    rows = sorted(figures_of(findings), key=lambda row: str(row["strategy"]))
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
