"""/race and /sweep: the last prompt, the prompts of a file, or values of a setting, several times by every arm in
turns, to separate differences in speed from noise.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import geometric_mean
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments import races
from utils.commands.shared.registry import Command, CommandContext, Outcome, path_in
from utils.commands.shared.result_tables import ResultColumn, ResultTable, Row, figure, grouped
from utils.comparison import speed_claims as claims
from utils.comparison.arms import Arm
from utils.comparison.records import Report, shortened
from utils.comparison.warm_up import with_costs
from utils.config.settings import NGRAM_PARTS, SAMPLING_PARTS, Settings, setting_fields
from utils.errors import UserError, check_choice, naming
from utils.prompts.prompt_files import ALL_TASKS, Prompt, limited, read_prompts
from utils.text import count_of

MAX_REPEATS = 1000
EXAMPLE = "/race prompts.jsonl"
ON_SERVERS = "server_race"  # the record of a race of servers


def _race(argument: str, context: CommandContext) -> Outcome:
    # A first word that begins like a number must be a valid number.
    match = re.fullmatch(r"([-+.]?\d\S*)?\s*(.*?)(?:(?<!\S)limit=(\S*))?", argument, re.DOTALL)
    assert match is not None  # the pattern matches every argument
    number, file, limit = match.groups()
    repeats = WholeRange(1, MAX_REPEATS).parse(number) if number else None
    if not file.strip() and limit is None:
        return list(_last_reports(repeats or races.REPEATS, context))
    with naming("limit="):
        most = None if limit is None else WholeRange(1).parse(limit)
    return list(_file_reports(file.strip(), repeats or 1, most, context))


def _last_reports(repeats: int, context: CommandContext) -> Iterator[Report]:
    """The last prompt, by the local strategies and by the servers that have answered it."""
    harness, settings, last = context.harness, context.settings, context.harness.state.last
    on_servers = harness.state.servers and last is not None and any(arm.strategy is None for arm, _ in last.planned)
    if not on_servers or (last is not None and last.is_local and harness.runs_locally(settings)):
        last = harness.last()  # raises UserError if no local strategy ran it
        arms = races.local_arms(harness, settings)
        item = races.RaceItem(1, Prompt(last.text), ALL_TASKS, settings, arms, last.job.history)
        yield _report("race", [item], repeats, context, subject=last.text)
    if last is not None and on_servers:
        arms = races.server_arms(harness, list(harness.state.servers))
        item = races.RaceItem(1, Prompt(last.text), ALL_TASKS, settings, arms)
        yield _report(ON_SERVERS, [item], repeats, context, subject=last.text)


def _file_reports(file: str, repeats: int, limit: int | None, context: CommandContext) -> Iterator[Report]:
    """All prompts of a file, or at most `limit` of each task. Raises UserError for a file that cannot be used."""
    path = path_in(file, EXAMPLE)
    prompts, harness, settings = read_prompts(path), context.harness, context.settings
    chosen = range(len(prompts)) if limit is None else limited(prompts, limit)
    limits = "" if limit is None else f" limit={limit}"
    part = "" if len(chosen) == len(prompts) else f"{len(chosen)} of "
    title = f"/race {repeats} {path}{limits}: {part}{count_of(len(prompts), 'prompt')}"
    kinds: list[tuple[str, list[Arm]]] = []
    if not harness.state.servers or harness.runs_locally(settings):
        kinds.append(("suite", races.local_arms(harness, settings)))
    if harness.state.servers:
        kinds.append((ON_SERVERS, races.server_arms(harness, list(harness.state.servers))))
    for record, arms in kinds:
        own = ((index + 1, prompts[index], races.requested(settings, prompts[index])) for index in chosen)
        items = [races.RaceItem(number, one, one.task, changed, arms) for number, one, changed in own]
        yield _report(record, items, repeats, context, subject=str(path), title=title)


def _report(
    record: str,
    items: Sequence[races.RaceItem],
    repeats: int,
    context: CommandContext,
    *,
    subject: str,
    title: str = "",
) -> Report:
    """The report of a race. Of servers, only their own rows are shown. `title` is empty for the last prompt."""
    on_servers, race = record == ON_SERVERS, races.ArmRace(context.harness, items, repeats)
    shown = [arm for arm in items[0].arms if arm.strategy is None or not on_servers]
    return races.race_table(items, servers=on_servers).report(
        *(record, subject, context.settings),
        races.then_rows(race.run_all, lambda: races.race_rows(race.results, shown)),
        conclude=lambda rows: races.race_conclusion(rows, len(items) if title else None),
        title=(title or f'/race {repeats} of "{shortened(subject)}"') + ", on servers" * on_servers,
    )


RACE = Command(
    "race",
    "[N] [FILE]",
    "is the difference real? N runs of each",
    _race,
    group="does it help?",
    rank=2,
    about=f"Every strategy that is on runs the last prompt N times (default {races.REPEATS}), or each prompt of a FILE "
    "(default 1), in turns. A file has one prompt per line, or JSON lines, such as those of Spec-Bench.",
    example=("> /race 5", "speculative is faster: 1.52x target-only (95 % interval 1.41 to 1.63)."),
    syntax=(
        "/race N               the last prompt, N times",
        "/race N FILE          all prompts of a file, N times",
        "/race N FILE limit=3  3 prompts of each task of the file",
    ),
    files=("",),
)


SETTINGS = ("gamma", "drafter_kind", "length", "processor", "seed", "verify", "cache")
# Parts of settings by their last words: temperature, top_k, top_p, order, ...
PARTS = {part.name.removeprefix("ngram "): part for part in (*SAMPLING_PARTS, *NGRAM_PARTS)}
EXAMPLES = "/sweep gamma 0 2 4, /sweep temperature 0.5 1 x9 (nine repeats), or /sweep processor greedy, nucleus 0.8 0.9"
ALL_NOISE = "Drafts saved nothing with any value (1.00 tokens per target forward): differences in speed are noise."
OTHER_TEXTS = (
    "The texts differ between the values, so their tokens/s are not compared. What can be compared is the speed-up "
    "over target-only with the same value:"
)
AGAIN = ", then /race 5 measures it again: the best of several values looks slightly better than it is"
MORE_REPEATS = f"Next: x{claims.MIN_VALUES} at the end of the line runs enough repeats."


def sweep_table(setting: str) -> ResultTable:
    """The columns of a sweep; the first one has the values of the setting."""
    return ResultTable(
        ResultColumn(setting, lambda row: row["setting"].partition(" ")[2]),
        figure("strategy", "strategy"),
        races.spread("tokens/s", "tokens_per_second", "{:.1f}"),
        races.RANGE,
        ResultColumn("speed-up", claims.speedup_text),
        ResultColumn("95 % interval", lambda row: claims.interval_text(row["interval"]), 2),
        figure("acceptance", "acceptance_rate", "{:.3f}", drop=3),
        figure("tokens/forward", "tokens_per_target_forward", "{:.2f}", drop=4),
        races.SAME_TEXT,
    )


def _sweep(argument: str, context: CommandContext) -> Outcome:
    name, _, text = argument.partition(" ")
    # The end may be xN, a number of repeats.
    text, count = re.fullmatch(r"(.*?)(?:[\s,]*\bx(\S+))?\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
    repeats = WholeRange(1, MAX_REPEATS).parse(count) if count else races.REPEATS
    # Values with blanks, such as `nucleus 0.8 0.9`, need commas; others may use blanks.
    words = [value.strip() for value in (text.split(",") if "," in text else text.split()) if value.strip()]
    if not words:
        raise UserError(f"give a setting and values, for example: {EXAMPLES}.")
    check_choice(name, (*SETTINGS, *PARTS), "setting that can be swept")
    last, harness = context.harness.last(), context.harness
    prompt = Prompt(last.text)
    # Arms of a value that cannot run are refused before anything runs.
    items = [
        races.RaceItem(1, prompt, label, settings, races.local_arms(harness, settings), last.job.history)
        for label, settings in (_swept_value(name, word, context) for word in words)
    ]
    race = races.ArmRace(harness, items, repeats)
    return [
        sweep_table(name).report(
            *("sweep", last.text, context.settings),
            races.then_rows(partial(_run_values, race), partial(_swept_rows, race)),
            conclude=conclusion,
            title=f'/sweep {name}, {count_of(repeats, "repeat")} of "{shortened(last.text)}"',
        )
    ]


def _swept_value(name: str, word: str, context: CommandContext) -> tuple[str, Settings]:
    """The label of a value, and the settings with it. Raises UserError if the value is not valid."""
    entry = PARTS.get(name) or setting_fields()[name]
    settings = entry.change(context.settings, word, context.limits)
    return f"{name} {word if name in PARTS else entry.show(settings)}", settings


def _run_values(race: races.ArmRace) -> None:
    # Costs of drafters that the session has not used yet are measured before any run is timed.
    race.items = [replace(item, settings=with_costs(race.harness, item.settings)) for item in race.items]
    race.run_all()


def _swept_rows(race: races.ArmRace) -> Iterator[dict[str, Any]]:
    texts: dict[str, int] = {}  # the number of each different text
    for item in race.items:
        for arm in item.arms:
            if group := [result for result in race.results if result.item is item and result.arm is arm]:
                number = texts.setdefault(group[0].ours[0].text, len(texts))
                yield races.race_row(item.group, group) | {"setting": item.group, "text_number": number}


def conclusion(rows: Sequence[Row]) -> list[str]:
    """What the repeats show about the values, and what to do next."""
    rows = [row for row in rows if row["lossless"]]
    if len({row["text_number"] for row in rows}) > 1:
        # No claim across values, because a text that is easier to draft is generated faster.
        return [OTHER_TEXTS, *(races.best_of_each(grouped(rows, "setting")) or [races.NO_TARGET])]
    drafting = [row for row in rows if row["verdict"] != claims.BASELINE]
    gaining = [row for row in drafting if not row["without_gain"]]
    if not gaining:
        return [ALL_NOISE if drafting else races.NO_RIVAL]
    best = max(gaining, key=lambda row: geometric_mean(max(speed, 1e-9) for speed in row["tokens_per_second"]))
    if best["speedup"] is None:
        return [races.NO_TARGET]
    name, claim = _labelled(best), claims.claim_text(best)
    if len(best["tokens_per_second"]) < claims.MIN_VALUES:
        about = f"{name}, about {best['speedup']:.1f}x target-only"
        return [f"Too few repeats to tell. The highest speed is that of {about}.", MORE_REPEATS]
    if best["verdict"] != claims.FASTER:
        return [f"No value is measurably faster than target-only. The highest is {name}: {claim}."]
    others = [row for row in gaining if row is not best]
    near = [_labelled(row) for row in others if _claim(best, row) != claims.FASTER]
    sentence = f"{name} is {'the fastest' if others else 'faster'}: {claim}."
    if near:
        sentence = f"The highest speed is that of {name}: {claim}. Not distinguishable from it: {', '.join(near)}."
    setting, _, value = best["setting"].partition(" ")
    command = PARTS[setting].name if setting in PARTS else setting
    return [sentence, f"Next: /{command} {value} keeps this value{AGAIN if others else ''}."]


def _claim(best: Row, other: Row) -> str:
    pairs = zip(best["tokens_per_second"], other["tokens_per_second"], strict=False)  # Ctrl-C may leave one shorter
    verdict: str = claims.speed_claim([[ours / theirs for ours, theirs in pairs if theirs]])["verdict"]
    return verdict


def _labelled(row: Row) -> str:
    return f"{row['strategy']} with {row['setting']}"


SWEEP = Command(
    "sweep",
    "NAME VALUE ...",
    "one setting over several values",
    _sweep,
    group="checks",
    about=f"Each runs the last prompt N times (default {races.REPEATS}), in turns. Commas separate values of several "
    "words.",
    example=("> /sweep gamma 2 4 8", "gamma 4   1.52x target-only"),
    syntax=(
        "/sweep NAME VALUE VALUE ... [xN]",
        "/sweep temperature 0.5 1 x5",
        "/sweep processor greedy, nucleus 0.8 0.9",
    ),
    words=dict.fromkeys((*SETTINGS, *PARTS), ""),
)
