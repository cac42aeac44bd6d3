"""/race: runs the last prompt, or the prompts of a file, several times with every enabled strategy and every server in
turns, to separate differences in speed from noise.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from utils.bounds import WholeRange
from utils.commands.experiments.race_results import REPEATS, race_conclusion, race_rows, race_table
from utils.commands.experiments.race_runs import ArmRace, RaceItem, local_arms, server_arms, then_findings
from utils.commands.shared.columns import figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.arms import Arm
from utils.comparison.benchmark_tables import NO_SAMPLE, BenchmarkSample
from utils.comparison.reports import Report, shortened
from utils.errors import UserError
from utils.prompts.conversation import Turns
from utils.prompts.prompt_files import Prompt, limited, read_prompts

MAX_REPEATS = 1000
EXAMPLE = "/race prompts.jsonl"


@dataclass(frozen=True, slots=True)
class _Race:
    """What is run. `prompts` have their numbers in the file, from 1. `subject` is the prompt or the file in records."""

    context: CommandContext
    prompts: Sequence[tuple[int, Prompt]]
    repeats: int
    subject: str
    title: str
    is_file: bool = False
    sample: BenchmarkSample = NO_SAMPLE

    def on_servers(self) -> Report:
        """The report of the servers."""
        harness = self.context.harness
        return self.report("server_race", server_arms(harness, list(harness.state.servers)), on_servers=True)

    def report(self, record: str, arms: Sequence[Arm], history: Turns = (), *, on_servers: bool = False) -> Report:
        """The report of these arms. Of servers, only their own rows are shown."""
        settings, sample, count = self.context.settings, self.sample, len(self.prompts)
        items = [RaceItem(number, prompt, prompt.task, settings, arms, history) for number, prompt in self.prompts]
        race = ArmRace(self.context.harness, items, self.repeats)
        shown = [arm for arm in arms if arm.strategy is None] if on_servers else arms
        table = race_table(items, servers=on_servers)
        return Report(
            *(record, self.subject, settings, table.headings),
            then_findings(race.events(), lambda: map(table.finding, race_rows(race.results, shown, sample))),
            lambda findings: race_conclusion(figures_of(findings), count if self.is_file else None),
            tables=lambda findings: sample.tables(figures_of(findings), settings.length) if sample.name else [],
            optional=table.optional,
            title=self.title + ", on servers" * on_servers,
        )


def _race(argument: str, context: CommandContext) -> Outcome:
    # A first word that begins like a number must be a valid number. The limit may come before or after the file.
    match = re.fullmatch(r"([-+.]?\d\S*)?\s*(?:limit=(\S*)\s*)?(.*?)(?:(?<!\S)limit=(\S*))?", argument, re.DOTALL)
    assert match is not None  # the pattern matches every argument
    number, first, file, last = match.groups()
    repeats = WholeRange(1, MAX_REPEATS).parse(number) if number else None
    limit = last if first is None else first
    if not file.strip() and limit is None:
        return list(map(RunReport, _last_reports(repeats or REPEATS, context)))
    try:
        most = None if limit is None else WholeRange(1).parse(limit)
    except UserError as error:
        raise UserError(f"limit: {error}") from error
    return list(map(RunReport, _file_reports(file.strip(), repeats or 1, most, context)))


def _last_reports(repeats: int, context: CommandContext) -> Iterator[Report]:
    """The last prompt, by the local strategies and by the servers that have answered it."""
    harness, settings, last = context.harness, context.settings, context.harness.state.last
    on_servers = harness.state.servers and last is not None and any(arm.strategy is None for arm, _ in last.planned)
    if not on_servers or (last is not None and last.is_local and harness.runs_locally(settings)):
        last = harness.last()  # raises UserError if no local strategy ran it
        yield _of_last(repeats, context, last.text).report("race", local_arms(harness, settings), last.job.history)
    if last is not None and on_servers:
        yield _of_last(repeats, context, last.text).on_servers()


def _of_last(repeats: int, context: CommandContext, text: str) -> _Race:
    return _Race(context, [(1, Prompt(text))], repeats, text, f'/race {repeats} of "{shortened(text)}"')


def _file_reports(file: str, repeats: int, limit: int | None, context: CommandContext) -> Iterator[Report]:
    """All prompts of a file, or at most `limit` of each task. Raises UserError for a file that cannot be used."""
    path = path_in(file, EXAMPLE)
    prompts, harness, settings = list(read_prompts(path)), context.harness, context.settings
    if not prompts:
        raise UserError(f"the prompts file {path} holds no prompt: write one per line.")
    chosen = range(len(prompts)) if limit is None else limited(prompts, limit)
    numbered = [(index + 1, prompts[index]) for index in chosen]
    sample = BenchmarkSample.chosen([prompt for _, prompt in numbered], len(prompts))
    title = f"/race {repeats} {path}{'' if limit is None else f' limit={limit}'}: {sample.text}"
    race = _Race(context, numbered, repeats, str(path), title, True, sample)
    if not harness.state.servers or harness.runs_locally(settings):
        yield race.report("suite", local_arms(harness, settings))
    if harness.state.servers:
        yield race.on_servers()


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
