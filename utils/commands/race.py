"""/race: runs the last prompt, or the prompts of a file, several times with every enabled strategy and every server in
turns, to separate differences in speed from noise.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from utils.bounds import WholeRange
from utils.commands.experiments.paired_runs import local_arms, server_arms
from utils.commands.experiments.race_conclusion import (
    REPEATS,
    file_conclusion,
    repeats_conclusion,
    server_conclusion,
)
from utils.commands.experiments.race_figures import race_charts, race_rows, race_table
from utils.commands.experiments.race_runs import ArmRace, RaceItem
from utils.commands.experiments.repeated_runs import then_findings
from utils.commands.shared.columns import figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.arms import Arm
from utils.comparison.benchmark_tables import NO_SAMPLE, BenchmarkSample
from utils.comparison.charts import TARGET_ONLY
from utils.comparison.reports import Note, Report, ReportEvent, shortened
from utils.errors import UserError
from utils.prompts.conversation import Turns
from utils.prompts.prompt_files import Prompt, limited, read_prompts

MAX_REPEATS = 1000
MANY = 50  # number of prompts from which a note recommends a limit
EXAMPLE = "/race prompts.jsonl"
Numbered = tuple[int, Prompt]  # a prompt with its number in the file, from 1
Conclude = Callable[[Sequence[dict[str, Any]]], list[str]]


@dataclass(frozen=True, slots=True)
class _Race:
    """What is run. `subject` is the prompt or the file as records have it, `note` a sentence before the first run."""

    context: CommandContext
    prompts: Sequence[Numbered]
    repeats: int
    subject: str
    title: str
    sample: BenchmarkSample = NO_SAMPLE
    note: str = ""
    history: Turns = ()

    def local(self, record: str, arms: Sequence[Arm], conclude: Conclude) -> Report:
        """The report of the local strategies."""
        return self._report(record, arms, arms, conclude)

    def on_servers(self) -> Report:
        """The report of the servers."""
        harness = self.context.harness
        arms = server_arms(harness, list(harness.state.servers))
        servers = [arm for arm in arms if arm.strategy is None]
        report = self._report("server_race", arms, servers, server_conclusion, over="the baseline")
        return replace(report, title=f"{self.title}, on servers")

    def _report(
        self, record: str, arms: Sequence[Arm], shown: Sequence[Arm], conclude: Conclude, *, over: str = TARGET_ONLY
    ) -> Report:
        settings, sample = self.context.settings, self.sample
        items = [RaceItem(number, prompt, prompt.task, settings, arms, self.history) for number, prompt in self.prompts]
        race = ArmRace(self.context.harness, items, self.repeats)
        table = race_table(items, servers=over != TARGET_ONLY)
        return Report(
            *(record, self.subject, settings, table.headings),
            then_findings(self._events(race), lambda: map(table.finding, race_rows(race.results, shown, sample))),
            lambda findings: conclude(figures_of(findings)),
            charts=partial(race_charts, over=over),
            tables=lambda findings: sample.tables(figures_of(findings), settings.length) if sample.name else [],
            optional=table.optional,
            title=self.title,
        )

    def _events(self, race: ArmRace) -> Iterator[ReportEvent]:
        if self.note:
            yield Note(self.note)
        yield from race.events()


def _race(argument: str, context: CommandContext) -> Outcome:
    repeats, file, limit = _parsed(argument)
    if file or limit is not None:
        return list(map(RunReport, _file_reports(file, repeats or 1, limit, context)))
    return list(map(RunReport, _last_reports(repeats or REPEATS, context)))


def _last_reports(repeats: int, context: CommandContext) -> Iterator[Report]:
    """The last prompt, by the local strategies and by the servers that have answered it."""
    harness, settings = context.harness, context.settings
    last = harness.state.last
    on_servers = (
        last is not None and bool(harness.state.servers) and any(arm.strategy is None for arm, _ in last.planned)
    )
    if not on_servers or (last is not None and last.is_local and harness.runs_locally(settings)):
        own = harness.last()  # raises UserError if no local strategy ran it
        race = _Race(context, [(1, Prompt(own.text))], repeats, own.text, _title(repeats, own.text))
        yield replace(race, history=own.job.history).local("race", local_arms(harness, settings), repeats_conclusion)
    if last is not None and on_servers:
        yield _Race(context, [(1, Prompt(last.text))], repeats, last.text, _title(repeats, last.text)).on_servers()


def _title(repeats: int, text: str) -> str:
    return f'/race {repeats} of "{shortened(text)}"'


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
    many = limit is None and len(numbered) >= MANY
    note = f"All {len(numbered)} prompts are run. With limit=3 after the file, 3 of each task are." if many else ""
    race = _Race(context, numbered, repeats, str(path), title, sample, note)
    if not harness.state.servers or harness.runs_locally(settings):
        verified = harness.pair.engine.state.verified
        conclude = partial(file_conclusion, prompts=len(numbered), verify=settings.verify, engine_is_verified=verified)
        yield race.local("suite", local_arms(harness, settings), conclude)
    if harness.state.servers:
        yield race.on_servers()


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
