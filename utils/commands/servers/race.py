"""/race with servers: every prompt several times by every server in turns, with speed-ups over the named baselines.

Speeds are compared within a repeat of a prompt only, because the load of a machine drifts. /race calls this; the local
strategies have a report of their own.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from utils.commands.experiments.repeated_runs import one_by_one, rotated, then_findings
from utils.commands.servers.race_figures import HEADINGS, OPTIONAL, ServerResult, charts, conclusion, findings_of
from utils.comparison.benchmark_tables import NO_SAMPLE, BenchmarkSample
from utils.comparison.harness import Harness
from utils.comparison.reports import Note, Progress, Report, ReportEvent
from utils.comparison.server_requests import request_maker
from utils.comparison.server_runs import LocalRun, ServerRun, compare_run, row_name
from utils.config.settings import Settings
from utils.decode.steps import FinishReason
from utils.errors import UserError
from utils.prompts.conversation import Turn, Turns
from utils.prompts.prompt_files import Prompt
from utils.servers.address_list import TARGET
from utils.servers.connection import Connection, RequestFor
from utils.text import count_of, decode

RECORD = "server_race"
WARM_UP_TOKENS = 4
NO_ANSWER = "no server has answered any of the prompts."
Numbered = tuple[int, Prompt]  # a prompt with its number in the file, from 1


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
    several = len({prompt.task for _, prompt in prompts}) > 1

    def run(index: int, numbered: Numbered) -> Generator[ReportEvent, None, float | None]:
        found, new = _results(harness, settings, numbered, rotated(servers, index))
        for note in sorted(new - notes):
            yield Note(note)
        notes.update(new)
        results.extend(replace(result, repeat=index // len(prompts)) for result in found)
        return sum(result.run.seconds for result in found) if found else None

    rows = [row_name(server.address.name) for server in servers]
    yield Progress(
        f"warming up, then {count_of(len(prompts), 'prompt')} by {', '.join(rows)}, {count_of(repeats, 'run')} each ..."
    )
    short = replace(settings, length=min(WARM_UP_TOKENS, settings.length))
    _results(harness, short, (prompts[0][0], replace(prompts[0][1], later=())), servers)
    # The prompts one after the other and then again, so that a machine that slows down affects all of them alike.
    yield from then_findings(
        one_by_one(list(prompts) * repeats, lambda numbered: numbered[1].task, run),
        lambda: findings_of(
            results, list(map(row_name, (s.address.name for s in servers))), sample, with_tasks=several
        ),
    )
    if not results:
        raise UserError(NO_ANSWER)


def _results(
    harness: Harness, settings: Settings, numbered: Numbered, order: Sequence[Connection]
) -> tuple[list[ServerResult], set[str]]:
    """The answers to all turns of one prompt, and a sentence for each server that gave none.

    Every server continues its own answers. Texts are compared only where the conversations before them are equal.
    """
    number, prompt = numbered
    results: list[ServerResult] = []
    notes: set[str] = set()
    histories: dict[str, Turns] = {row_name(server.address.name): () for server in order}  # of those that answer
    for turn, text in enumerate((prompt.text, *prompt.later) if settings.uses_chat else (prompt.text,)):
        target = None if turn else _target(harness, settings, text, order)
        runs: list[ServerRun] = []
        for server in (server for server in order if row_name(server.address.name) in histories):
            name = row_name(server.address.name)
            try:
                runs.append(_ask(server, request_maker(harness, text, settings, histories[name])))
            except UserError as error:
                del histories[name]
                notes.add(f"{name}: prompt {number} is left out. {error}")
        for run in runs:
            comparison = compare_run(run, runs, target, settings)
            if comparison.baseline in histories and histories[comparison.baseline] != histories[run.name]:
                comparison = replace(comparison, same=None, first_difference=None)
            results.append(ServerResult(number, prompt.task, run, comparison))
        histories |= {run.name: (*histories[run.name], Turn(text, run.text)) for run in runs}
    return results, notes


def _ask(server: Connection, request_for: RequestFor) -> ServerRun:
    """One answer. Raises KeyboardInterrupt on Ctrl-C and UserError if there is none."""
    run = ServerRun(server.address, server.ask(request_for))
    # A stream turns Ctrl-C into a partial answer; a report must end instead.
    if run.finish is FinishReason.INTERRUPTED:
        raise KeyboardInterrupt
    return run


def _target(harness: Harness, settings: Settings, text: str, servers: Sequence[Connection]) -> LocalRun | None:
    """The local target's run, if a server is compared with it."""
    if not harness.has_pair or all(server.address.baseline != TARGET for server in servers):
        return None
    run = harness.run_alone(harness.prompt_ids(text, settings), harness.baseline, settings)
    return LocalRun(run, decode(harness.pair.tokenizer, run.tokens))
