"""/gate and --gate: have recorded runs become slower, do they accept fewer drafts, or do they give other texts?

Each record is run again as by /replay, in passes over all of them, until every strategy is decided. A speed-up over
target-only is compared with the recorded one, so that a slower or busier machine does not count. Without runs of the
target, tokens/s are compared. Bounds of a loss are 95 % intervals (`utils.metrics.intervals`).
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log
from operator import truediv
from statistics import fmean, geometric_mean, variance
from typing import Any

from utils.bounds import GATE_REPEATS, MOST_REPEATS, TOLERANCE
from utils.commands.experiments.reruns import DIFFERENT, KEPT_STORAGE, rerun
from utils.commands.shared.registry import Command, CommandContext, Outcome, path_in
from utils.commands.shared.result_tables import NOTHING, ResultColumn, ResultTable, Row, figure
from utils.comparison import records
from utils.comparison.speed_claims import MIN_VALUES, interval_text
from utils.errors import UserError
from utils.files import os_reason
from utils.metrics.intervals import Interval, speedup_interval
from utils.servers.address import TARGET
from utils.text import count_of

PERCENT, REPEATS = "5", "5"
SUMMARY = "GITHUB_STEP_SUMMARY"  # names the file to which GitHub Actions lets a step append Markdown
PASSED, WORSE, UNDECIDED, REFERENCE = "passed", "worse", "not distinguishable", "reference"
WORDS = {0: "passed", 1: "FAILED", 3: "not distinguishable"}
SPEEDUP, SPEED = "speed-up over target-only", "tokens/s"
RECORD_MORE = "at least 5 recorded runs of a prompt, or 5 prompts, are needed: append more runs to the file"
Runs = Mapping[int, records.RecordedRun]  # by the line of their record
# A record and its run in each pass, all beside the target's run of the same request, or None.
Sides = Sequence[tuple[records.RecordedRun, records.RecordedRun | None]]


def _accepted(row: Row) -> str:
    return NOTHING if None in row["accepted"] else " -> ".join(f"{share:.3f}" for share in row["accepted"])


TABLE = ResultTable(
    figure("strategy", "strategy"),
    figure("runs", "runs", drop=1),
    ResultColumn("recorded -> now", lambda row: " -> ".join(f"{value:.2f}" for value in row["values"])),
    figure("ratio", "ratio", "{:.3f}"),
    ResultColumn("95 % interval", lambda row: interval_text(row["interval"])),
    ResultColumn("accepted/token", _accepted, drop=2),
    ResultColumn("same texts", lambda row: f"{row['same_texts']} of {row['compared_texts']}", drop=3),
    figure("gate", "verdict"),
)


def verdict_of(interval: Interval, floor: float) -> str:
    """Whether a ratio of now to the record is above the floor, below it, or neither is certain.

    An interval twice as wide must exclude 1 as well for WORSE: otherwise equal runs with few degrees of freedom would
    be called slower in up to 2.5 % of looks, and a gate looks after every pass. With it, 0 of 300 simulated gates with
    six prompts and recorded noise failed, and 4 of 300 with one prompt and six runs.
    """
    if interval.low >= floor:
        return PASSED
    # Only the upper half counts; in logarithms it is twice as wide.
    return WORSE if interval.high < floor and interval.high**2 < interval.estimate else UNDECIDED


def figures_of(runs: Sequence[Sides], floor: float) -> dict[str, Any]:
    """The speeds and the accepted drafts of one strategy, and whether they are above the floor."""
    past = [sides[0][0] for sides in runs]
    values = [[_speed(*side) for side in sides] for sides in runs]
    then, *passes = zip(*values, strict=True)
    interval = _interval(past, (geometric_mean(now) / then for then, *now in values))
    verdict = verdict_of(interval, floor)
    return {
        "strategy": past[0].row["strategy"],
        "by": SPEEDUP if runs[0][0][1] else SPEED,
        "runs": f"{len(runs)} x {len(passes)}",
        "values": [geometric_mean(then), geometric_mean(map(geometric_mean, passes))],
        "ratio": interval.estimate,
        "interval": [interval.low, interval.high] if interval.is_bounded else None,
        "speed": verdict,
        "more": more_runs(interval, floor, [now for _, *now in values]) if verdict == UNDECIDED else "",
        **acceptance_figures(past, [sides[1][0] for sides in runs], floor),
    }


def _speed(run: records.RecordedRun, target: records.RecordedRun | None) -> float:
    """The speed-up over the target, or the tokens/s without its run."""
    return float(run.row["tokens_per_second"] / (target.row["tokens_per_second"] if target else 1))


def acceptance_figures(
    past: Sequence[records.RecordedRun], now: Sequence[records.RecordedRun], floor: float
) -> dict[str, Any]:
    """Accepted drafts per token: it is decided by counts where the texts are the same, since nothing is random."""
    shares = [_accepted_per_token(past), _accepted_per_token(now)]
    if not any(shares):
        return {"accepted": [None, None], "drafts": NOTHING}
    if all(map(_is_same, past, now)):
        return {"accepted": shares, "drafts": PASSED if shares[1] >= floor * shares[0] else WORSE}
    # Half a draft more, so that a text without accepted drafts has a logarithm.
    rates = ([_accepted_per_token([run], 0.5) for run in runs] for runs in (now, past))
    return {"accepted": shares, "drafts": verdict_of(_interval(past, map(truediv, *rates)), floor)}


def text_figures(runs: Sequence[Sides], repeatable: frozenset[int]) -> dict[str, Any]:
    """Texts that equal the record's, and the lines of those that differ although equality is guaranteed: from the
    record in the lines of `repeatable`, where nothing differs that could change a text, and from the target's text.
    """
    same, wrong = 0, list[int]()
    for (past, _), *now in runs:
        is_same = all(_is_same(past, one) for one, _ in now)
        unlike_target = any(other and one.row["repeats_target"] and not _is_same(one, other) for one, other in now)
        same += is_same
        wrong += [past.line] * (unlike_target or (past.line in repeatable and not is_same))
    return {"compared_texts": len(runs), "same_texts": same, "other_texts_in_lines": wrong}


def more_runs(interval: Interval, floor: float, passes: Sequence[Sequence[float]]) -> str:
    """How many more repeats or records would decide. `passes` has the values of each record in every pass."""
    if not interval.is_bounded:
        return RECORD_MORE
    count, repeats = len(passes), len(passes[0])
    needed = abs(log(interval.estimate / floor)) / log(interval.high / interval.low) * 2
    # Variances of the mean, in units of that which would decide.
    total = (log(interval.high / interval.low) / 4) ** 2
    now = fmean(variance(map(log, values)) for values in passes) / count / repeats if repeats > 1 else total / 2
    left = total * needed**2 - max(0.0, total - now)
    if left > 0 and (more := ceil(repeats * now / left) - repeats) <= MOST_REPEATS - repeats:
        return f"about {count_of(max(1, more), 'more repeat')} would do (--repeats {repeats + max(1, more)})"
    if needed and (more := ceil(count / needed**2)) <= 20 * count:
        return f"more repeats would not do, but about {more} recorded runs instead of {count}"
    return "the loss is too close to the tolerance: choose another one"


def _interval(runs: Sequence[records.RecordedRun], ratios: Iterable[float]) -> Interval:
    """The interval of ratios by prompt. Those of these prompts vary only by noise, if there are several of each."""
    groups = [*records.gathered(zip((run.request for run in runs), ratios, strict=True)).values()]
    if len(runs) < MIN_VALUES:
        return Interval(geometric_mean(ratio for group in groups for ratio in group))
    return speedup_interval(groups, these_prompts=min(map(len, groups)) > 1)


def _accepted_per_token(runs: Sequence[records.RecordedRun], further: float = 0.0) -> float:
    tokens = sum(len(run.row.get("token_ids") or ()) for run in runs)
    return (sum(run.row.get("accepted") or 0 for run in runs) + further) / max(1, tokens)


def _is_same(one: records.RecordedRun, other: records.RecordedRun) -> bool:
    ours, theirs = (list(run.row.get("token_ids") or ()) for run in (one, other))
    return ours == theirs if ours and theirs else bool(one.row.get("text") == other.row.get("text"))


def references(runs: Sequence[records.RecordedRun]) -> dict[int, int]:
    """The line of the nearest run of the target with the same request for the lines of the other strategies. Those of
    a strategy are left out if one of its runs has none.
    """
    tasks = {run.line: (run.request, run.values(("chat", *records.TASK))) for run in runs}
    targets = records.gathered((tasks[run.line], run.line) for run in runs if run.row["strategy"] == TARGET)
    lacking = {TARGET, *(run.row["strategy"] for run in runs if tasks[run.line] not in targets)}
    lines = (run.line for run in runs if run.row["strategy"] not in lacking)
    return {line: min(targets[tasks[line]], key=lambda other: abs(other - line)) for line in lines}


@dataclass(slots=True)
class _Gate:
    """The records that are gated, and what their passes have measured. `problems` has the lines that are not measured,
    by reason, and `refused` is the number of those that fail.
    """

    file: records.RecordsFile
    context: CommandContext
    percent: float
    repeats: int
    passes: list[Runs] = field(default_factory=list)
    matches: list[records.RunMatch] = field(default_factory=list)
    problems: dict[str, list[int]] = field(default_factory=dict)
    refused: int = 0

    def measured(self) -> Iterator[Row]:
        """The rows of all passes that are needed."""
        if servers := [run.line for run in self.file.runs if run.row.get(records.SERVER)]:
            self.problems["only runs of strategies are measured, no servers."] = servers
        self.file.runs = [run for run in self.file.runs if run.line not in servers]
        countdown, warm = records.Countdown(self.context.harness.progress), set[tuple[str, ...]]()
        rows: list[dict[str, Any]] = []
        try:
            while not rows or (len(self.passes) < self.repeats and self._may_decide(rows)):
                self._pass(countdown, warm)
                rows = self.rows()
        finally:  # Ctrl-C is raised again once the rows of the finished passes are consumed
            yield from rows
        if path := os.environ.get(SUMMARY):
            try:
                with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(self.markdown(rows))
            except OSError as error:
                raise UserError(f"the summary {path} cannot be written: {os_reason(error)}.") from error

    def _may_decide(self, rows: Sequence[Row]) -> bool:
        return any(row["verdict"] == UNDECIDED and row["interval"] for row in rows) and self.status(rows) != 1

    def _pass(self, countdown: records.Countdown, warm: set[tuple[str, ...]]) -> None:
        """Run every record once. In the first pass those that cannot run are removed."""
        number, runs, now = len(self.passes), self.file.runs, dict[int, records.RecordedRun]()
        for index, past in enumerate(runs):
            where = f"repeat {number + 1} of at most {self.repeats}: {index + 1} of {len(runs)}"
            countdown.progress((number + index / len(runs)) / self.repeats, where)
            try:
                found = rerun(past, self.context, warm)
            except UserError as error:
                self.problems.setdefault(str(error), []).append(past.line)
                self.refused += 1
                continue
            if KEPT_STORAGE in found.notes:
                self.problems.setdefault(f"{KEPT_STORAGE}.", []).append(past.line)
                continue
            now[past.line] = found.second[0]
            self.matches += [] if number else [found]
        self.file.runs = [run for run in runs if run.line in now]
        if not now:
            raise UserError(f"none of the records could be measured. {' '.join(self._not_measured())}")
        self.passes.append(now)

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each strategy."""
        known, sides = references(self.file.runs), ({run.line: run for run in self.file.runs}, *self.passes)
        # The text must be the record's if the engine is verified, and nothing is different.
        verified = [found for found in self.matches if found.second[0].row["engine"].get("verified")]
        repeatable = frozenset(found.first[0].line for found in verified if not records.differences([found]))
        rows = []
        for name, own in records.gathered((run.row["strategy"], run) for run in self.file.runs).items():
            runs = [[(side[run.line], side.get(known.get(run.line, 0))) for side in sides] for run in own]
            row = figures_of(runs, 1 - self.percent / 100) | text_figures(runs, repeatable)
            if name == TARGET and known:
                row |= {"speed": REFERENCE, "more": ""}
            verdicts = (row["speed"], row["drafts"], WORSE if row["other_texts_in_lines"] else PASSED)
            row["verdict"] = next((one for one in (WORSE, UNDECIDED) if one in verdicts), row["speed"])
            rows.append(row)
        return rows

    def status(self, rows: Sequence[Row]) -> int:
        verdicts = {row["verdict"] for row in rows}
        return 1 if WORSE in verdicts or self.refused else 3 if UNDECIDED in verdicts else 0

    def _not_measured(self) -> list[str]:
        found = (records.problem_sentence("A", lines, reason) for reason, lines in self.problems.items())
        return [*self.file.left_out, *found]

    def conclusion(self, rows: Sequence[Row]) -> list[str]:
        """What differs, what was not measured, and one line for CI."""
        lines = [f"{row['strategy']}: {row['more']}." for row in rows if row["more"]]
        lines += ["Not measured:", *problems] if (problems := self._not_measured()) else []
        lines += [DIFFERENT, *found] if (found := records.differences(self.matches)) else []
        parts = [*[f"{count_of(self.refused, 'record')} could not run"] * bool(self.refused), *map(_sentence, rows)]
        return [*lines, f"gate: {WORDS[self.status(rows)]} (tolerance {self.percent:g} %): {'; '.join(parts)}."]

    def markdown(self, rows: Sequence[Row]) -> str:
        *lines, last = self.conclusion(rows)
        table = [TABLE.headings, ("---",) * len(TABLE.headings), *map(TABLE.cells, rows)]
        shown = [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in table]
        return "\n".join([f"**{last}**", "", *shown, "", *(f"- {line}" for line in lines), ""])


def _sentence(row: Row) -> str:
    low, high = row["interval"] or (0.0, inf)
    words = {WORSE: " is slower,", UNDECIDED: f" is {UNDECIDED},", REFERENCE: " is not gated,"}.get(row["speed"], "")
    text = f"{row['strategy']}{words} {row['ratio']:.3f} of the recorded {row['by']} ({low:.3f} to {high:.3f})"
    if row["drafts"] in (WORSE, UNDECIDED):
        text += f", {'perhaps ' * (row['drafts'] != WORSE)}fewer drafts accepted ({_accepted(row)} per token)"
    if lines := row["other_texts_in_lines"]:
        text += f", {len(lines)} other texts (line {lines[0]}) where equality is guaranteed"
    return text


def _gate(argument: str, context: CommandContext) -> Outcome:
    match = re.fullmatch(r"(.*?)(?:\s+(\d\S*)%)?(?:\s+x(\d\S*))?", argument, re.DOTALL)
    assert match is not None  # the pattern matches every argument
    name, percent, repeats = match.groups()
    file = records.read_records(path_in(name, "/gate runs.jsonl"))
    limits = TOLERANCE.parse(percent or PERCENT), GATE_REPEATS.parse(repeats or REPEATS)
    gate = _Gate(file, context, *limits)
    shown = ("gate", str(file.path), context.settings, gate.measured())
    title = f"/gate: {file.path}, at most {count_of(gate.repeats, 'repeat')}"
    return [TABLE.report(*shown, conclude=gate.conclusion, title=title, status=gate.status)]


GATE = Command(
    "gate",
    "FILE [P%] [xN]",
    "are recorded runs slower, or worse?",
    _gate,
    group="checks",
    about="Run the records of a --json file again, at most N times (5), until it is clear whether their speed-up over "
    "target-only is lower by more than P % (5). Fewer accepted drafts, and other texts where equal ones are "
    "guaranteed, count as well. infer.py --gate FILE has the exit status 0, 1 (worse) or 3 (not distinguishable).",
    example=("> /gate runs.jsonl x3", "gate: passed (tolerance 5 %): speculative 0.998 of the recorded speed-up ..."),
    files=("",),
)
