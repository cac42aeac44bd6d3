"""/sweep: runs the last prompt several times with each of several values of a setting, by every enabled strategy."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log
from statistics import mean
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.race_results import NO_RIVAL, NO_TARGET, RANGE, best_of_each, race_row, spread
from utils.commands.experiments.race_runs import ArmRace, RaceItem, local_arms, then_findings
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure, figures_of
from utils.commands.shared.outcomes import Outcome
from utils.commands.shared.registry import Command, CommandContext
from utils.comparison.harness import Harness
from utils.comparison.reports import ReportEvent, shortened
from utils.comparison.speed_claims import (
    BASELINE,
    FASTER,
    MIN_VALUES,
    SpeedClaim,
    claim_text,
    interval_text,
    speedup_text,
)
from utils.comparison.warm_up import with_costs
from utils.config.settings import NGRAM_PARTS, SAMPLING_PARTS, Settings, setting_fields
from utils.errors import UserError, check_choice
from utils.metrics.results import difference_text, first_difference
from utils.prompts.prompt_files import Prompt
from utils.text import count_of

REPEATS, MAX_REPEATS = 5, 100
SETTINGS = ("gamma", "drafter_kind", "length", "processor", "seed", "verify", "cache")
# Parts of settings by their last words: temperature, top_k, top_p, order, ...
PARTS = {part.name.removeprefix("ngram "): part for part in (*SAMPLING_PARTS, *NGRAM_PARTS) if not part.is_switch}
EXAMPLES = "/sweep gamma 0 2 4, /sweep temperature 0.5 1 x9 (nine repeats), or /sweep processor greedy, nucleus 0.8 0.9"
ALL_NOISE = "Drafts saved nothing with any value (1.00 tokens per target forward): differences in speed are noise."
OTHER_TEXTS = (
    "The texts differ between the values, so their tokens/s are not compared. What can be compared is the speed-up "
    "over target-only with the same value:"
)
AGAIN = ", then /race 5 measures it again: the best of several values looks slightly better than it is"
MORE_REPEATS = f"Next: x{MIN_VALUES} at the end of the line runs enough repeats."


def sweep_table(setting: str) -> ResultTable:
    """The columns of a sweep; the first one has the values of the setting."""
    return ResultTable(
        ResultColumn(setting, lambda row: row["setting"].partition(" ")[2]),
        figure("strategy", "strategy"),
        spread("tokens/s", "tokens_per_second", "{:.1f}"),
        RANGE,
        ResultColumn("speed-up", speedup_text),
        ResultColumn("95 % interval", lambda row: interval_text(row["interval"]), 2),
        figure("acceptance", "acceptance_rate", "{:.3f}", drop=3),
        figure("tokens/forward", "tokens_per_target_forward", "{:.2f}", drop=4),
        ResultColumn("text", _text),
    )


def _text(row: Row) -> str:
    compared = row["lossless"] and row["same_as_target"] is not None
    return difference_text(row["first_difference"]) if compared else NOTHING


def _sweep(argument: str, context: CommandContext) -> Outcome:
    name, _, text = argument.partition(" ")
    # The end may be xN, a number of repeats.
    text, count = re.fullmatch(r"(.*?)(?:[\s,]*\bx(\S+))?\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
    repeats = WholeRange(1, MAX_REPEATS).parse(count) if count else REPEATS
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
    events, title = _events(harness, items, table, repeats=repeats), f"/sweep {name}, {count_of(repeats, 'repeat')} of "
    return [
        table.report(
            *("sweep", last.text, context.settings, events),
            conclude=lambda findings: conclusion(figures_of(findings)),
            title=f'{title}"{shortened(last.text)}"',
        )
    ]


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
    for item in race.items:
        for arm in item.arms:
            group = [result for result in race.results if result.item is item and result.arm is arm]
            if not group:
                continue
            tokens, same = group[0].ours[0].tokens or (), [one.same for one in group]
            theirs = group[0].theirs[0].tokens if group[0].theirs else None
            yield race_row(item.group, group) | {
                "setting": item.group,
                "text_number": texts.setdefault(tokens, len(texts)),
                "same_as_target": None if None in same else all(same),
                "first_difference": None if theirs is None else first_difference(tokens, theirs),
            }


def conclusion(rows: Sequence[Row]) -> list[str]:
    """What the repeats show about the values, and what to do next. `rows` are the figures of the findings."""
    rows = [row for row in rows if row["lossless"]]
    several = len({row["text_number"] for row in rows}) > 1
    return _with_texts(rows) if several else _with_one_text([row for row in rows if row["verdict"] != BASELINE])


def _with_texts(rows: Sequence[Row]) -> list[str]:
    """No claim across values, because a text that is easier to draft is generated faster."""
    by_value: dict[str, list[Row]] = {}
    for row in rows:
        by_value.setdefault(row["setting"], []).append(row)
    if not (sentences := best_of_each(by_value)):
        return [OTHER_TEXTS, NO_TARGET]
    return [OTHER_TEXTS, *sentences]


def _with_one_text(drafting: Sequence[Row]) -> list[str]:
    gaining = [row for row in drafting if not row["without_gain"]]
    if not gaining:
        return [ALL_NOISE if drafting else NO_RIVAL]
    best = max(gaining, key=lambda row: mean(log(max(speed, 1e-9)) for speed in row["tokens_per_second"]))
    name, claim = _name(best), "" if best["speedup"] is None else f": {claim_text(best)}"
    if len(best["tokens_per_second"]) < MIN_VALUES:
        about = claim and f", about {best['speedup']:.1f}x target-only"
        return [f"Too few repeats to tell. The highest speed is that of {name}{about}.", MORE_REPEATS]
    if claim and best["verdict"] != FASTER:
        return [f"No value is measurably faster than target-only. The highest is {name}{claim}."]
    others = [row for row in gaining if row is not best]
    near = [_name(row) for row in others if _claim(best, row) != FASTER]
    sentence = f"{name} is {'the fastest' if others else 'faster'}{claim}."
    if near:
        sentence = f"The highest speed is that of {name}{claim}. Not distinguishable from it: {', '.join(near)}."
    setting, _, value = best["setting"].partition(" ")
    command = PARTS[setting].name if setting in PARTS else setting
    return [sentence, *([f"Next: /{command} {value} keeps this value{AGAIN if others else ''}."] if claim else [])]


def _claim(best: Row, other: Row) -> str:
    """The claim for the ratios of two rows in the same repeat."""
    pairs = zip(best["tokens_per_second"], other["tokens_per_second"], strict=False)  # Ctrl-C may leave one shorter
    return SpeedClaim.of([[ours / theirs for ours, theirs in pairs if theirs]]).verdict


def _name(row: Row) -> str:
    return f"{row['strategy']} with {row['setting']}"


SWEEP = Command(
    "sweep",
    "NAME VALUE ...",
    "one setting over several values",
    _sweep,
    group="checks",
    about=f"Run the last prompt N times (default {REPEATS}) with each value of a setting, in turns. Commas separate "
    "values of several words.",
    example=("> /sweep gamma 2 4 8", "gamma 4   1.52x target-only"),
    syntax=(
        "/sweep NAME VALUE VALUE ... [xN]",
        "/sweep temperature 0.5 1 x5",
        "/sweep processor greedy, nucleus 0.8 0.9",
    ),
    see_also=("race", "whatif"),
    words=dict.fromkeys((*SETTINGS, *PARTS), ""),
)
