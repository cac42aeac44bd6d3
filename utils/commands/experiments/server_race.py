"""/race with servers: every prompt several times by every server in turns, with speed-ups over their baselines.

Speeds are compared within a repeat of a prompt only, because the load of a machine drifts. Local strategies have a
separate report. /verdict shares the turns and the rows.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from utils.commands.experiments.repeated_runs import one_by_one, rotated, then_findings
from utils.comparison.arms import Arm, ServerArm, complete
from utils.comparison.benchmark_tables import NO_SAMPLE, BenchmarkSample, Place, ServerTurns, server_benchmark_figures
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.harness import Harness
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent, shortened
from utils.comparison.run_texts import text_figures
from utils.comparison.runs import Run, compare_run, row_name
from utils.comparison.speed_claims import FASTER, Row, SpeedClaim, interval_text, speed_sentence, speedup_text
from utils.comparison.summary import NO_BASELINE
from utils.comparison.warm_up import shortened as shorter_settings
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.results import Comparison
from utils.prompts.conversation import Turn, Turns
from utils.prompts.prompt_files import ALL_TASKS, Prompt
from utils.servers.address import TARGET
from utils.servers.connection import Connection
from utils.text import count_of

RECORD = "server_race"
GONE = "{} has not answered {} prompts in a row, so it is not asked again."
MOST_FAILURES = 2  # after this many prompts in a row without an answer, a server is considered gone
NO_ANSWER = "no server has answered any of the prompts."
Numbered = tuple[int, Prompt]  # a prompt with its number in the file, from 1
HEADINGS = (
    "task",
    "server",
    "tokens/s",
    "time to first token",
    "decode tokens/s",
    "speed-up",
    "95 % interval",
    "acceptance",
    "tokens/forward",
    "text",
)
OPTIONAL = ("tokens/forward", "decode tokens/s", "time to first token", "acceptance")
SHOWN_TASK = 16  # characters of a task in the table
SAME = "{}: {} of {} texts equal those of {}"
OTHERS = ", not at prompt {}"
SHOWN_PROMPTS = 8
UNPAIRED = "{}: no speed-up over {}. It needs answers of both to the same prompts, token counts, and one host."
OTHER_REASON = "{}: no drafts of these answers are known, so the difference may have another reason than speculation."


@dataclass(frozen=True, slots=True)
class ServerResult:
    """One answer to a prompt (numbered from 1), compared with the baseline's in the same repeat."""

    number: int
    task: str
    run: Run
    comparison: Comparison
    repeat: int = 0


def server_race(
    harness: Harness,
    settings: Settings,
    prompts: Sequence[Numbered],
    *,
    repeats: int,
    title: str,
    sample: BenchmarkSample = NO_SAMPLE,
) -> Report:
    """The report. `prompts` have their numbers in the file, and `title` has its heading and its subject.

    `sample` describes the prompts of a benchmark.
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
        present = [arm for arm in arms if failures.get(arm.name, 0) < MOST_FAILURES]
        if not any(arm.strategy is None for arm in present):
            return None
        found, new = prompt_results(harness, settings, numbered, rotated(present, index))
        for note in sorted(new - notes):
            yield Note(note)
        notes.update(new)
        answered = {result.run.name for result in found}
        for name in [arm.name for arm in present if arm.strategy is None]:
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
    # Whole passes over the prompts, so that a machine that slows down affects all of them alike.
    yield from then_findings(
        one_by_one(list(prompts) * repeats, lambda numbered: numbered[1].task, run),
        lambda: findings_of(
            results, list(map(row_name, (s.address.name for s in servers))), sample, with_tasks=several
        ),
    )
    if not results:
        raise UserError(NO_ANSWER)


def with_target(harness: Harness, servers: Sequence[Connection]) -> list[Arm]:
    """The servers, after the local target if one of them is compared with it."""
    is_baseline = harness.has_pair and any(server.address.baseline == TARGET for server in servers)
    arms = [ServerArm(server, harness.loaded) for server in servers]
    return [harness.arm(harness.baseline), *arms] if is_baseline else [*arms]


def warm_up_arms(harness: Harness, settings: Settings, numbered: Numbered, arms: Sequence[Arm]) -> None:
    """Request a short answer from each arm, because the first one may be slow."""
    prompt_results(harness, shorter_settings(settings), (numbered[0], replace(numbered[1], later=())), arms)


def prompt_results(
    harness: Harness, settings: Settings, numbered: Numbered, order: Sequence[Arm]
) -> tuple[list[ServerResult], set[str]]:
    """The answers to all turns of one prompt, and a sentence for each server that failed.

    Every server continues its own answers. The local target answers the first turn only, in its place in the order.
    Texts are compared only if the conversations before them are equal.
    """
    number, prompt = numbered
    results: list[ServerResult] = []
    notes: set[str] = set()
    histories: dict[str, Turns] = {arm.name: () for arm in order if arm.strategy is None}  # of servers that answer
    for turn, text in enumerate((prompt.text, *prompt.later) if settings.uses_chat else (prompt.text,)):
        runs: list[Run] = []
        for arm in order:
            is_left_out = arm.name not in histories if arm.strategy is None else turn > 0
            if is_left_out:
                continue
            try:
                runs.append(complete(arm.run(text, settings, histories.get(arm.name, ()))))
            except UserError as error:
                if arm.strategy is not None:
                    raise
                del histories[arm.name]
                notes.add(f"{arm.name}: prompt {number} is left out. {error}")
        answers = [run for run in runs if run.address is not None]
        for run in answers:
            comparison = compare_run(run, runs, settings)
            if comparison.baseline in histories and histories[comparison.baseline] != histories[run.name]:
                comparison = replace(comparison, same=None, first_difference=None)
            results.append(ServerResult(number, prompt.task, run, comparison))
            if run.address is not None and not turn:
                harness.state.servers.note_text(run.address.name, text, comparison.same)
        histories |= {run.name: (*histories[run.name], Turn(text, run.text)) for run in answers}
    return results, notes


def findings_of(
    results: Sequence[ServerResult], names: Sequence[str], sample: BenchmarkSample, *, with_tasks: bool
) -> Iterator[Finding]:
    """A row for each task and server. If there are several tasks, a group for all prompts comes last."""
    tasks = list(dict.fromkeys(result.task for result in results))
    if len(tasks) > 1:
        tasks = [*(task for task in tasks if task != ALL_TASKS), ALL_TASKS]
    for task in tasks:
        for name in names:
            group = [result for result in results if result.run.name == name and task in (result.task, ALL_TASKS)]
            if group:
                row = _figures(task, group)
                row["benchmark"] = sample.named(_benchmark_figures(group, results)) if sample.name else None
                cells = _cells(row)
                yield Finding(cells if with_tasks else cells[1:], row)


def _figures(task: str, group: Sequence[ServerResult]) -> dict[str, Any]:
    runs = [result.run for result in group]
    drafted, accepted = _drafts(runs)
    tokens, seconds = _sum([run.new_tokens for run in runs]), sum(run.seconds for run in runs)
    passes = None if accepted is None else _sum([_forwards(run) for run in runs])
    forwards = tokens / passes if tokens and passes else None
    speedups = speedups_by_prompt(group, "speedup")
    claim = SpeedClaim.of(speedups, tokens_per_forward=forwards if drafted else None)
    return {
        "task": task,
        "strategy": runs[0].name,
        "baseline": group[0].comparison.baseline,
        "prompts": len({result.number for result in group}),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": [run.tokens_per_second for run in runs if run.tokens_per_second is not None],
        "pooled_tokens_per_second": tokens / seconds if tokens and seconds else None,
        "first_token_seconds": [run.first_seconds for run in runs if run.first_seconds is not None],
        "decode_tokens_per_second": [
            run.decode_tokens_per_second for run in runs if run.decode_tokens_per_second is not None
        ],
        "speedups": [speedup for values in speedups for speedup in values],
        "speedups_by_prompt": speedups,
        **claim.figures,
        "decode_speedups_by_prompt": speedups_by_prompt(group, "decode_speedup"),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
        "tokens_per_target_forward": forwards,
        **text_figures((result.number, result.comparison.same) for result in group),
    }


def _benchmark_figures(group: Sequence[ServerResult], results: Sequence[ServerResult]) -> dict[str, Any]:
    """The figures of the results in `group`, all of one server. `results` also include its baseline."""
    baseline = group[0].comparison.baseline
    return server_benchmark_figures(
        _turns(group), _turns([result for result in results if result.run.name == baseline])
    )


def _turns(results: Sequence[ServerResult]) -> dict[Place, ServerTurns]:
    """The turns of each prompt in each repeat, by one server."""
    runs: dict[Place, list[Run]] = {}
    for result in results:
        runs.setdefault((result.repeat, result.number), []).append(result.run)
    return {place: ServerTurns(turns) for place, turns in runs.items()}


def _drafts(runs: Sequence[Run]) -> tuple[int | None, int | None]:
    """The drafts of all runs and how many of them were accepted.

    Both are None if nothing is known or if a run's figures are not its own. A run without figures among others with
    figures had no drafts.
    """
    found = [run.acceptance for run in runs if run.acceptance is not None]
    if not found or not all(one.valid for one in found):
        return None, None
    return sum(one.drafted for one in found), sum(one.accepted for one in found)


def _forwards(run: Run) -> int | None:
    """Forward passes of the target for one answer, as counted by the server: drafts after its end may be accepted."""
    found = run.acceptance
    return run.new_tokens if found is None else found.forwards


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum, or None if one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def speedups_by_prompt(group: Sequence[ServerResult], ratio: str) -> list[list[float]]:
    """The speed-ups of each prompt in its repeats. `ratio` is the field of Comparison."""
    by_prompt: dict[int, list[float]] = {}
    for result in group:
        if value := getattr(result.comparison, ratio):
            by_prompt.setdefault(result.number, []).append(value)
    return list(by_prompt.values())


def _cells(row: Row) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    first, decoding = row["first_token_seconds"], row["decode_tokens_per_second"]
    return (
        shortened(row["task"], SHOWN_TASK),
        row["strategy"],
        text(row["pooled_tokens_per_second"], "{:.1f}"),
        text(1000 * median(first) if first else None, "{:.0f} ms"),
        text(median(decoding) if decoding else None, "{:.1f}"),
        speedup_text(row),
        interval_text(row["interval"]),
        text(row["acceptance_rate"], "{:.3f}"),
        text(row["tokens_per_target_forward"], "{:.2f}"),
        f"same {row['same_texts']}/{row['compared_texts']}" if row["compared_texts"] else "-",
    )


def conclusion(findings: Sequence[Finding]) -> list[str]:
    """What the repeats show about the speed and the text of each server, over all prompts."""
    rows = [finding.figures for finding in findings]
    overall = [row for row in rows if row["task"] == rows[-1]["task"]]
    lines = [sentence for row in overall if (sentence := speed_sentence(row))]
    lines += [
        OTHER_REASON.format(row["strategy"]) for row in overall if row["verdict"] == FASTER and not row["drafted"]
    ]
    lines += [_texts(row) for row in overall if row["compared_texts"]]
    if len(overall) > 1 and all(row["baseline"] is None for row in overall):
        lines.append(NO_BASELINE)
    if unpaired := [row for row in overall if row["baseline"] and not row["speedups"]]:
        lines += [UNPAIRED.format(row["strategy"], row["baseline"]) for row in unpaired]
    return lines or [f"{count_of(len(overall), 'server')} measured; there is no baseline to compare with."]


def _texts(row: Row) -> str:
    sentence = SAME.format(row["strategy"], row["same_texts"], row["compared_texts"], row["baseline"])
    others = row["other_texts_at_prompts"]
    listed = ", ".join(map(str, others[:SHOWN_PROMPTS])) + (", ..." if len(others) > SHOWN_PROMPTS else "")
    return sentence + (OTHERS.format(listed) if others else "") + "."


def charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-ups over the baselines, one dot for each prompt or run."""
    rows = [finding.figures for finding in findings]
    several = len({row["task"] for row in rows}) > 1
    named = [(f"{row['strategy']}, {row['task']}" if several else row["strategy"], row) for row in rows]
    if not any(row["speedups"] for row in rows):
        return []
    return [repeats_chart(named, "run" if max(row["prompts"] for row in rows) == 1 else "prompt", "the baseline")]
