"""/race with servers: every prompt several times by every server in turns, with speed-ups over the named baselines.

Speeds are compared within a repeat of a prompt only, because the load of a machine drifts. /race calls this; the local
strategies have a report of their own.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from utils.commands.experiments.repeated_runs import one_by_one, rotated, then_findings
from utils.commands.servers.race_figures import HEADINGS, OPTIONAL, ServerResult, charts, conclusion, findings_of
from utils.commands.servers.race_runs import (
    MOST_FAILURES,
    NO_ANSWER,
    Numbered,
    prompt_results,
    warm_up_arms,
    with_target,
)
from utils.comparison.benchmark_tables import NO_SAMPLE, BenchmarkSample
from utils.comparison.harness import Harness
from utils.comparison.reports import Note, Progress, Report, ReportEvent
from utils.comparison.server_runs import row_name
from utils.config.settings import Settings
from utils.errors import UserError
from utils.text import count_of

RECORD = "server_race"
GONE = "{} has not answered {} prompts in a row, so it is not asked again."


def server_race(
    harness: Harness,
    settings: Settings,
    prompts: Sequence[Numbered],
    *,
    repeats: int,
    title: str,
    sample: BenchmarkSample = NO_SAMPLE,
) -> Report:
    """The report. prompts: with their numbers in the file. title: its heading and its subject.

    sample: which prompts of a benchmark these are.
    """
    several = len({prompt.task for _, prompt in prompts}) > 1
    return Report(
        RECORD,
        prompts[0][1].text if len(prompts) == 1 else title,
        settings,
        HEADINGS if several else HEADINGS[1:],
        _events(harness, settings, prompts, sample, repeats=repeats),
        conclusion,
        charts=charts,
        tables=lambda findings: sample.tables([finding.figures for finding in findings], settings.length),
        optional=OPTIONAL,
        title=f"{title}, on servers",
    )


def _events(
    harness: Harness, settings: Settings, prompts: Sequence[Numbered], sample: BenchmarkSample, *, repeats: int
) -> Iterator[ReportEvent]:
    results: list[ServerResult] = []
    notes: set[str] = set()
    servers = list(harness.state.servers)
    arms = with_target(harness, servers)
    several = len({prompt.task for _, prompt in prompts}) > 1
    failures = dict.fromkeys((row_name(server.address.name) for server in servers), 0)

    def run(index: int, numbered: Numbered) -> Generator[ReportEvent, None, float | None]:
        present = [arm for arm in arms if arm is None or failures[row_name(arm.address.name)] < MOST_FAILURES]
        if not any(present):
            return None
        found, new = prompt_results(harness, settings, numbered, rotated(present, index))
        for note in sorted(new - notes):
            yield Note(note)
        notes.update(new)
        answered = {result.run.name for result in found}
        for name in [row_name(arm.address.name) for arm in present if arm]:
            failures[name] = 0 if name in answered else failures[name] + 1
            if failures[name] == MOST_FAILURES:
                yield Note(GONE.format(name, MOST_FAILURES))
        results.extend(replace(result, repeat=index // len(prompts)) for result in found)
        return sum(result.run.seconds for result in found) if found else None

    rows = [row_name(server.address.name) for server in servers]
    yield Progress(
        f"warming up, then {count_of(len(prompts), 'prompt')} by {', '.join(rows)}, {count_of(repeats, 'run')} each ..."
    )
    warm_up_arms(harness, settings, prompts[0], arms)
    # The prompts one after the other and then again, so that a machine that slows down affects all of them alike.
    yield from then_findings(
        one_by_one(list(prompts) * repeats, lambda numbered: numbered[1].task, run),
        lambda: findings_of(
            results, list(map(row_name, (s.address.name for s in servers))), sample, with_tasks=several
        ),
    )
    if not results:
        raise UserError(NO_ANSWER)
