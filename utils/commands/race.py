"""/race: runs the last prompt, or the prompts of a file, several times with every enabled strategy and every server in
turns, to separate differences in speed from noise.
"""

import re
from collections.abc import Iterator, Sequence

from utils.bounds import WholeRange
from utils.commands.experiments.race_results import REPEATS, race_conclusion, race_rows, race_table
from utils.commands.experiments.race_runs import ArmRace, RaceItem, local_arms, server_arms, then_findings
from utils.commands.shared.columns import figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import Command, CommandContext
from utils.comparison.arms import Arm
from utils.comparison.benchmark_tables import NO_SAMPLE, BenchmarkSample
from utils.comparison.reports import shortened
from utils.errors import UserError
from utils.prompts.prompt_files import ALL_TASKS, Prompt, limited, read_prompts

MAX_REPEATS = 1000
EXAMPLE = "/race prompts.jsonl"
ON_SERVERS = "server_race"  # the record of a race of servers


def _race(argument: str, context: CommandContext) -> Outcome:
    # A first word that begins like a number must be a valid number. The limit may come before or after the file.
    match = re.fullmatch(r"([-+.]?\d\S*)?\s*(?:limit=(\S*)\s*)?(.*?)(?:(?<!\S)limit=(\S*))?", argument, re.DOTALL)
    assert match is not None  # the pattern matches every argument
    number, first, file, last = match.groups()
    repeats = WholeRange(1, MAX_REPEATS).parse(number) if number else None
    limit = last if first is None else first
    if not file.strip() and limit is None:
        return list(_last_reports(repeats or REPEATS, context))
    try:
        most = None if limit is None else WholeRange(1).parse(limit)
    except UserError as error:
        raise UserError(f"limit: {error}") from error
    return list(_file_reports(file.strip(), repeats or 1, most, context))


def _last_reports(repeats: int, context: CommandContext) -> Iterator[RunReport]:
    """The last prompt, by the local strategies and by the servers that have answered it."""
    harness, settings, last = context.harness, context.settings, context.harness.state.last
    on_servers = harness.state.servers and last is not None and any(arm.strategy is None for arm, _ in last.planned)
    if not on_servers or (last is not None and last.is_local and harness.runs_locally(settings)):
        last = harness.last()  # raises UserError if no local strategy ran it
        item = RaceItem(1, Prompt(last.text), ALL_TASKS, settings, local_arms(harness, settings), last.job.history)
        yield _report("race", [item], repeats, context, subject=last.text)
    if last is not None and on_servers:
        item = RaceItem(1, Prompt(last.text), ALL_TASKS, settings, server_arms(harness, list(harness.state.servers)))
        yield _report(ON_SERVERS, [item], repeats, context, subject=last.text)


def _file_reports(file: str, repeats: int, limit: int | None, context: CommandContext) -> Iterator[RunReport]:
    """All prompts of a file, or at most `limit` of each task. Raises UserError for a file that cannot be used."""
    path = path_in(file, EXAMPLE)
    prompts, harness, settings = list(read_prompts(path)), context.harness, context.settings
    if not prompts:
        raise UserError(f"the prompts file {path} holds no prompt: write one per line.")
    chosen = range(len(prompts)) if limit is None else limited(prompts, limit)
    sample = BenchmarkSample.chosen([prompts[index] for index in chosen], len(prompts))
    title = f"/race {repeats} {path}{'' if limit is None else f' limit={limit}'}: {sample.text}"
    kinds: list[tuple[str, list[Arm]]] = []
    if not harness.state.servers or harness.runs_locally(settings):
        kinds.append(("suite", local_arms(harness, settings)))
    if harness.state.servers:
        kinds.append((ON_SERVERS, server_arms(harness, list(harness.state.servers))))
    for record, arms in kinds:
        items = [RaceItem(index + 1, prompts[index], prompts[index].task, settings, arms) for index in chosen]
        yield _report(record, items, repeats, context, subject=str(path), title=title, sample=sample)


def _report(
    record: str,
    items: Sequence[RaceItem],
    repeats: int,
    context: CommandContext,
    *,
    subject: str,
    title: str = "",
    sample: BenchmarkSample | None = None,
) -> RunReport:
    """The report of a race. Of servers, only their own rows are shown. `sample` is None for the last prompt."""
    on_servers, race = record == ON_SERVERS, ArmRace(context.harness, items, repeats)
    shown = [arm for arm in items[0].arms if arm.strategy is None or not on_servers]
    table, chosen, length = race_table(items, servers=on_servers), sample or NO_SAMPLE, context.settings.length
    return table.report(
        *(record, subject, context.settings),
        then_findings(race.events(), lambda: map(table.finding, race_rows(race.results, shown, chosen))),
        conclude=lambda findings: race_conclusion(figures_of(findings), len(items) if sample else None),
        tables=lambda findings: chosen.tables(figures_of(findings), length) if chosen.name else [],
        title=(title or f'/race {repeats} of "{shortened(subject)}"') + ", on servers" * on_servers,
    )


RACE = Command(
    "race",
    "[N] [FILE]",
    "is the difference real? N runs of each",
    _race,
    group="does it help?",
    rank=2,
    about=f"Run the last prompt N times (default {REPEATS}) with every strategy that is on, in turns, and say whether "
    "the differences in speed are larger than the noise. With a FILE, run each of its prompts N times (default 1) "
    "and report by task. A file has one prompt per line, or JSON lines. One of Spec-Bench or "
    "SPEED-Bench also gets the table of that benchmark.",
    example=("> /race 5", "speculative is faster: 1.52x target-only (95 % interval 1.41 to 1.63)."),
    syntax=(
        "/race N               the last prompt, N times",
        "/race N FILE          all prompts of a file, N times",
        "/race N FILE limit=3  3 prompts of each task of the file",
    ),
    see_also=("verdict", "sweep", "why", "speed-up"),
    files=("",),
)
