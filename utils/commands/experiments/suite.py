"""/race N FILE: run every prompt of a file with every enabled strategy, and report results by task.

Speed-ups are computed within each repeat of a prompt. Tokens, seconds and drafts are pooled, so that long answers weigh
more than short ones. Prompts with several turns are conversations.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from utils.commands.experiments.repeated_runs import one_by_one, rotated, then_findings
from utils.commands.experiments.server_race import server_race
from utils.commands.experiments.suite_conclusion import suite_conclusion
from utils.commands.experiments.suite_figures import HEADINGS, OPTIONAL, Result, charts, findings_of, results_of
from utils.commands.experiments.turn_runs import ONLY_FIRST_TURNS, has_skipped_turns, turn_runs
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import CommandContext
from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent
from utils.comparison.strategies import Strategy
from utils.comparison.warm_up import warm_up
from utils.config.settings import Settings
from utils.decode.model_session import ModelSession
from utils.errors import UserError
from utils.metrics.results import Generation, pooled
from utils.prompts.prompt_files import Prompt, limited, read_prompts
from utils.text import count_of

MANY = 50  # number of prompts from which a note recommends a limit
MOST_NOTES = 6  # maximum number of notes on skipped prompts; a file of long prompts could have hundreds
FURTHER = "Further prompts are left out, too. The table shows how many were run."
EXAMPLE = "/race prompts.jsonl"
Numbered = tuple[int, Prompt]  # a prompt with its number in the file, from 1


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """What is run. `prompts` are the selected ones of the file, `limit` is the number for each task or None."""

    prompts: Sequence[Numbered]
    sample: BenchmarkSample
    repeats: int
    limit: int | None

    @property
    def notes(self) -> Iterator[Note]:
        """Notes before the first run."""
        if self.limit is None and len(self.prompts) >= MANY:
            yield Note(f"All {len(self.prompts)} prompts are run. With limit=3 after the file, 3 of each task are.")


def suite(file: str, repeats: int, context: CommandContext, *, limit: int | None = None) -> Outcome:
    """The report of /race N FILE. `limit` is the maximum number of prompts of each task.

    Raises UserError for a file that cannot be used.
    """
    path = path_in(file, EXAMPLE)
    prompts, harness, settings = list(read_prompts(path)), context.harness, context.settings
    if not prompts:
        raise UserError(f"the prompts file {path} holds no prompt: write one per line.")
    chosen = range(len(prompts)) if limit is None else limited(prompts, limit)
    numbered = [(index + 1, prompts[index]) for index in chosen]
    sample = BenchmarkSample.chosen([prompt for _, prompt in numbered], len(prompts))
    plan = SuitePlan(numbered, sample, repeats, limit)
    title = f"/race {repeats} {path}{'' if limit is None else f' limit={limit}'}: {sample.text}"
    on_servers = (
        [server_race(harness, settings, numbered, repeats=repeats, title=title, sample=sample)]
        if harness.state.servers
        else []
    )
    if on_servers and not harness.runs_locally(settings):
        return list(map(RunReport, on_servers))
    return [RunReport(_report(path, harness, settings, plan, title=title)), *map(RunReport, on_servers)]


def _report(path: Path, harness: Harness, settings: Settings, plan: SuitePlan, *, title: str) -> Report:
    """The report of the local strategies."""
    sample = plan.sample
    return Report(
        "suite",
        str(path),
        settings,
        HEADINGS,
        _events(harness, settings, plan, enabled=harness.enabled(settings)),
        partial(suite_conclusion, harness, settings, sample),
        charts=charts,
        tables=lambda findings: sample.tables([finding.figures for finding in findings], settings.length),
        optional=OPTIONAL,
        title=title,
    )


def _events(
    harness: Harness, settings: Settings, plan: SuitePlan, *, enabled: Sequence[Strategy]
) -> Iterator[ReportEvent]:
    results: list[list[Result]] = []  # of each prompt that could be run, in each repeat
    places: dict[int, int] = {}  # the index of each prompt that ran, by number
    notes: set[Note] = set()
    count = len(plan.prompts)

    def run(index: int, numbered: Numbered) -> Generator[ReportEvent, None, float | None]:
        number, prompt = numbered
        repeat = index // count
        # Rotated by the prompts that ran, so that a refused prompt skips no turn, and from repeat to repeat.
        order = rotated(enabled, places.get(number, len(places)) + repeat)
        runs, new = _runs(harness, numbered, order=order, settings=settings)
        for note in sorted(new - notes, key=lambda note: note.text):  # once, not in every repeat
            notes.add(note)
            if len(notes) <= MOST_NOTES:
                yield note
            elif len(notes) == MOST_NOTES + 1:
                yield Note(FURTHER)
        if not runs:
            # No seconds: a refused prompt does not predict how long the others take.
            return None
        places.setdefault(number, len(places))
        results.append(results_of((number, repeat), prompt.task, enabled, runs))
        return sum(run.seconds for run in runs.values())

    def findings() -> Iterator[Finding]:
        return findings_of([result for group in results for result in group], enabled, settings, plan.sample)

    yield from plan.notes
    if has_skipped_turns([prompt for _, prompt in plan.prompts], settings):
        yield Note(ONLY_FIRST_TURNS)
    names = ", ".join(strategy.name for strategy in enabled)
    runs_each = count_of(plan.repeats, "run")
    yield Progress(f"warming up, then {count_of(count, 'prompt')} by {names}, {runs_each} each ...")
    warm_up(harness, settings)
    # Whole passes over the prompts, so that a machine that slows down affects all of them alike.
    items = list(plan.prompts) * plan.repeats
    yield from then_findings(one_by_one(items, lambda numbered: numbered[1].task, run), findings)
    if not results:
        raise UserError("none of the prompts could be run.")


def _runs(
    harness: Harness, numbered: Numbered, *, order: Sequence[Strategy], settings: Settings
) -> tuple[dict[str, Generation], set[Note]]:
    """Runs by the strategy's name, all turns as one, and a sentence for each strategy that could not run."""
    number, prompt = numbered
    try:
        ids = harness.prompt_ids(prompt.text, settings)
        # An unusable prompt is refused once, not by every strategy.
        ModelSession(harness.pair.target, use_cache=False).begin(ids)
    except UserError as error:
        return {}, {Note(f"Prompt {number} is left out. {error}")}
    runs: dict[str, Generation] = {}
    notes: set[Note] = set()
    for strategy in order:
        try:
            turns = turn_runs(harness, prompt, strategy, settings, ids=ids)
        except UserError as error:
            notes.add(Note(f"{strategy.name}: prompt {number} is left out. {error}"))
        else:
            runs[strategy.name] = turns[0] if len(turns) == 1 else pooled(turns)
    return runs, notes
