"""The rows of /race with servers: the figures of each task and server, their cells, and what they mean."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.reports import Finding, shortened
from utils.comparison.server_benchmark import Place, ServerTurns, server_benchmark_figures
from utils.comparison.server_runs import ServerComparison, ServerRun
from utils.comparison.server_summary import NO_BASELINE
from utils.comparison.speed_claims import FASTER, Row, SpeedClaim, interval_text, speed_sentence, speedup_text
from utils.comparison.text_relation import text_figures
from utils.prompts.prompt_files import ALL_TASKS
from utils.text import count_of

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
    """One answer to one prompt, numbered from 1, and how it compares with the baseline's in the same repeat."""

    number: int
    task: str
    run: ServerRun
    comparison: ServerComparison
    repeat: int = 0


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
    """Of the results of one server. results: of all, its baseline included."""
    baseline = group[0].comparison.baseline
    return server_benchmark_figures(
        _turns(group), _turns([result for result in results if result.run.name == baseline])
    )


def _turns(results: Sequence[ServerResult]) -> dict[Place, ServerTurns]:
    """The turns of each prompt in each repeat, by one server."""
    runs: dict[Place, list[ServerRun]] = {}
    for result in results:
        runs.setdefault((result.repeat, result.number), []).append(result.run)
    return {place: ServerTurns(turns) for place, turns in runs.items()}


def _drafts(runs: Sequence[ServerRun]) -> tuple[int | None, int | None]:
    """The drafts of all runs and how many of them were accepted.

    None if nothing is known or if the figures of one run are not its own. A run of which nothing is known beside others
    had no drafts.
    """
    found = [run.answer.acceptance for run in runs if run.answer.acceptance is not None]
    if not found or not all(one.valid for one in found):
        return None, None
    return sum(one.drafted for one in found), sum(one.accepted for one in found)


def _forwards(run: ServerRun) -> int | None:
    """Forward passes of the target for one answer, as the engine counts them: drafts past its end may be accepted."""
    found = run.answer.acceptance
    return run.new_tokens if found is None else found.forwards


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum, or None if one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def speedups_by_prompt(group: Sequence[ServerResult], ratio: str) -> list[list[float]]:
    """The speed-ups of each prompt in its repeats. ratio: the field of ServerComparison."""
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
    """What the repeats tell about the speed and the text of each server, over all prompts."""
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
    """The speed-ups over the baselines, one dot per prompt or run."""
    rows = [finding.figures for finding in findings]
    several = len({row["task"] for row in rows}) > 1
    named = [(f"{row['strategy']}, {row['task']}" if several else row["strategy"], row) for row in rows]
    if not any(row["speedups"] for row in rows):
        return []
    return [repeats_chart(named, "run" if max(row["prompts"] for row in rows) == 1 else "prompt", "the baseline")]
