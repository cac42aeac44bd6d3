"""/compare: two --json files, prompt by prompt: of two machines, drafters, versions or settings. Nothing is run."""

import shlex
from functools import partial

from utils.commands.experiments.compared_runs import (
    TABLE,
    comparison_charts,
    comparison_lines,
    match_finding,
)
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.paths import path_in
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.recorded_runs import match, read_records
from utils.comparison.reports import Report
from utils.errors import UserError

EXAMPLE = "/compare a.jsonl b.jsonl"


def _compare(argument: str, context: CommandContext) -> Outcome:
    first, second = (read_records(path_in(name, EXAMPLE)) for name in _names(argument))
    matches, problems = match(first.runs, second.runs)
    if not matches:
        raise UserError(f"the files have no prompt and strategy in common. {' '.join(problems[:1])}")
    left_out = [*first.left_out, *second.left_out, *problems]
    conclude = partial(comparison_lines, matches, left_out, first.others + second.others)
    events = (match_finding(found, number) for number, found in enumerate(matches))
    files = f"{first.path} {second.path}"
    report = Report(
        *("compare", files, context.settings, TABLE.headings, events, conclude),
        charts=comparison_charts,
        optional=TABLE.optional,
        title=f"/compare: A is {first.path}, B is {second.path}",
    )
    return [RunReport(report)]


def _names(argument: str) -> list[str]:
    try:
        names = shlex.split(argument)
    except ValueError as error:
        raise UserError(f"a quotation mark is missing; an example: {EXAMPLE}.") from error
    if len(names) != 2:
        raise UserError(f"give two files, for example: {EXAMPLE}.")
    return names


COMPARE = Command(
    "compare",
    "A B",
    "two files of --json, prompt by prompt",
    _compare,
    group="results",
    page=Page(
        "Compare the runs in two files of --json: of two machines, drafters, versions or settings. Runs of the same "
        "prompt and strategy are compared; what has no counterpart is named. Nothing is run.",
        (
            "> /compare a.jsonl b.jsonl",
            "speculative: B is faster than A: B / A is 1.23 (95 % interval 1.10 to",
            "1.38 over 12 prompts).",
        ),
        see_also=("replay", "export"),
    ),
    files=("",),
)
