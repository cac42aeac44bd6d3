"""/compare and /replay: runs of the same prompt and strategy in two --json files A and B, or in A and run again now.

Speeds of the same prompt are compared, so differences in difficulty of the prompts do not count. The verdict is a
confidence interval over prompts (`utils.metrics.intervals`). /replay uses the settings of each record, the present
models, engine and versions, and an n-gram storage for each run, as with /ngram keep off.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

from utils.commands.experiments.reruns import DIFFERENT, rerun
from utils.commands.shared.registry import Command, CommandContext, Outcome, path_in
from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row, figure, grouped
from utils.comparison import records
from utils.errors import UserError
from utils.metrics.intervals import UNCLEAR, speedup_interval
from utils.metrics.results import difference_text, first_difference
from utils.text import count_of, split_words

EXAMPLE = "/compare a.jsonl b.jsonl"
SHOWN_PROMPT, SHOWN_LINES = 24, 20
AT_OTHER_TIMES = "A and B were recorded at different times: other load on the machines is part of the difference."
SAME = "Versions, models, engine, machine and settings are the same in A and B."
NOT_COMPARED = "Not compared:"
UNEXPLAINED = "Nothing that is recorded explains the other texts: /audit checks what is deterministic here."


def _acceptance(row: Row) -> str:
    counts = zip(row["accepted"], row["drafted"], strict=True)
    known = None not in (*row["accepted"], *row["drafted"])
    return " -> ".join(f"{part}/{whole}" for part, whole in counts) if known else NOTHING


def _text(row: Row) -> str:
    if row["same_text"] is None:
        return NOTHING
    place = row["first_difference"]
    return "differs" if place is None and not row["same_text"] else difference_text(place)


TABLE = ResultTable(
    ResultColumn("prompt", lambda row: records.shortened(row["prompt"], SHOWN_PROMPT)),
    figure("strategy", "strategy"),
    ResultColumn("runs", lambda row: " -> ".join(str(len(part)) for part in row["tokens_per_second"]), drop=1),
    ResultColumn(
        "tokens/s A -> B",
        lambda row: " -> ".join(f"{geometric_mean(part):.1f}" for part in row["tokens_per_second"]),
    ),
    ResultColumn("B / A", lambda row: f"{geometric_mean(row['ratios']):.2f}x"),
    ResultColumn("acceptance A -> B", _acceptance, drop=2),
    ResultColumn("text", _text),
)


def match_figures(found: records.RunMatch) -> dict[str, Any]:
    """The figures of a match. Lists of two are [A, B]."""
    first, second = ([run.row for run in side] for side in (found.first, found.second))
    one, other = first[0], second[0]
    speeds = [[row["tokens_per_second"] for row in side] for side in (first, second)]
    figures = {
        "prompt": one["prompt"],
        "strategy": one["strategy"],
        "lines": [[run.line for run in side] for side in (found.first, found.second)],
        "tokens_per_second": speeds,
        "ratios": _ratios(*speeds),
        **{name: [one.get(name), other.get(name)] for name in ("accepted", "drafted")},
    }
    ours, theirs = one.get("token_ids"), other.get("token_ids")
    # The ids of two tokenizers differ for the same text.
    if found.first[0].model != found.second[0].model or ours is None or theirs is None:
        texts = one.get("text"), other.get("text")
        return figures | {"same_text": None if None in texts else texts[0] == texts[1], "first_difference": None}
    place = first_difference(ours, theirs)
    return figures | {"same_text": place is None, "first_difference": place}


def _ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """B over A for each run of the shorter list. Several for one run would repeat its noise and look like agreement."""
    count = min(len(first), len(second))
    ours, theirs = ([geometric_mean(part[index::count]) for index in range(count)] for part in (first, second))
    return [other / one for one, other in zip(ours, theirs, strict=True)]


@dataclass(slots=True)
class _Comparison:
    """The matches of A and B.

    `left_out` are sentences on what has no match, and `others` counts other records by kind.
    """

    left_out: list[str]
    others: Counter[str]
    matches: list[records.RunMatch] = field(default_factory=list)

    def add(self, found: records.RunMatch) -> Row:
        self.matches.append(found)
        return match_figures(found)

    def conclusion(self, rows: Sequence[Row]) -> list[str]:
        lines = [line for name, own in grouped(rows, "strategy").items() for line in _verdict(name, own)]
        others = (f"{count_of(count, 'record')} of {name}." for name, count in self.others.items())
        if left := [*self.left_out, *others]:
            more = [f"and {len(left) - SHOWN_LINES} more."] if len(left) > SHOWN_LINES else []
            lines += [NOT_COMPARED, *left[:SHOWN_LINES], *more]
        if found := records.differences(self.matches):
            return [*lines, AT_OTHER_TIMES, DIFFERENT, *found]
        changed = any(row["same_text"] is False for row in rows)
        return [*lines, AT_OTHER_TIMES, SAME, *[UNEXPLAINED] * changed]


def _compare(argument: str, context: CommandContext) -> Outcome:
    names = split_words(argument)
    if len(names) != 2:
        raise UserError(f"give two files, for example: {EXAMPLE}.")
    first, second = (records.read_records(path_in(name, EXAMPLE)) for name in names)
    matches, problems = records.match(first.runs, second.runs)
    if not matches:
        raise UserError(f"the files have no prompt and strategy in common. {' '.join(problems[:1])}")
    comparison = _Comparison([*first.left_out, *second.left_out, *problems], first.others + second.others)
    files = f"A is {first.path}, B is {second.path}"
    rows, title = map(comparison.add, matches), f"/compare: {files}"
    return [TABLE.report("compare", files, context.settings, rows, conclude=comparison.conclusion, title=title)]


def _replay(argument: str, context: CommandContext) -> Outcome:
    file = records.read_records(path_in(argument, "/replay runs.jsonl"))
    comparison = _Comparison(file.left_out, file.others)
    files, rows = f"A is {file.path}, B is the same run now", _replayed(comparison, file.runs, context)
    title = f"/replay: {files}"
    return [TABLE.report("replay", files, context.settings, rows, conclude=comparison.conclusion, title=title)]


def _replayed(
    comparison: _Comparison, recorded: Sequence[records.RecordedRun], context: CommandContext
) -> Iterator[Row]:
    """Run all records again, as far as they can run here."""
    countdown, problems = records.Countdown(context.harness.progress), dict[str, list[int]]()
    warm = set[tuple[str, ...]]()
    try:
        for index, past in enumerate(recorded):
            where = f"{index + 1} of {len(recorded)} ({past.row['strategy']})"
            countdown.progress(index / len(recorded), where)
            try:
                found = rerun(past, context, warm)
            except UserError as error:
                problems.setdefault(str(error), []).append(past.line)
            else:
                yield comparison.add(found)
    finally:
        refused = [records.problem_sentence("A", lines, reason) for reason, lines in problems.items()]
        comparison.left_out += refused
        if left := len(recorded) - len(comparison.matches) - sum(map(len, problems.values())):
            comparison.left_out.append(f"{left} of {len(recorded)} records were not reached.")
    if not comparison.matches:
        raise UserError(f"none of the records could be run again. {' '.join(refused)}")


def _verdict(strategy: str, rows: Sequence[Row]) -> Iterator[str]:
    # By prompt: runs of one prompt with several settings are more alike than runs of other prompts.
    ratios = [[ratio for row in own for ratio in row["ratios"]] for own in grouped(rows, "prompt").values()]
    yield f"{strategy}: {_relation(ratios)}"
    counted = [row for row in rows if None not in (*row["accepted"], *row["drafted"])]
    totals = [[sum(row[name][side] for row in counted) for name in ("accepted", "drafted")] for side in (0, 1)]
    if all(drafted for _, drafted in totals):
        rates = (f"{accepted}/{drafted} = {accepted / drafted:.3f}" for accepted, drafted in totals)
        yield f"{strategy}, acceptance: {' in A, '.join(rates)} in B."
    if texts := [row["same_text"] for row in rows if row["same_text"] is not None]:
        yield f"{strategy}, texts: {sum(texts)} of {len(texts)} are the same."


def _relation(ratios: Sequence[Sequence[float]]) -> str:
    """How B compares with A, by the ratios of each prompt's runs."""
    interval = speedup_interval(ratios)
    if not interval.is_bounded:
        return f"B / A is about {interval.estimate:.2f} on one prompt, with a single run in a file: too few to tell."
    count, what = (len(ratios), "prompts") if len(ratios) > 1 else (len(ratios[0]), "runs of one prompt")
    words = interval.verdict if interval.verdict == UNCLEAR else f"B is {interval.verdict} than A"
    return (
        f"{words}: B / A is {interval.estimate:.2f} "
        f"(95 % interval {interval.low:.2f} to {interval.high:.2f} over {count} {what})."
    )


COMPARE = Command(
    "compare",
    "A B",
    "two files of --json, prompt by prompt",
    _compare,
    group="results",
    about="They may be of two machines, drafters, versions or settings. Nothing is run.",
    example=(
        "> /compare a.jsonl b.jsonl",
        "speculative: B is faster than A: B / A is 1.23 (95 % interval 1.10 to",
        "1.38 over 12 prompts).",
    ),
    files=("",),
)
REPLAY = Command(
    "replay",
    "FILE",
    "run the records of a file again",
    _replay,
    group="checks",
    about="Every generation of a --json file keeps its settings. Differences in versions, models and engine are named.",
    example=("> /replay runs.jsonl", "3 of 3 texts are the same"),
    files=("",),
)
