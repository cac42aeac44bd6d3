"""/verdict with servers: the best server on a few prompts against its baseline on other prompts, until it is clear.

As in the local verdict, no figure comes from the selection: the best of several servers would look better than it is on
the prompts on which it was chosen.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import mean
from typing import Any

from utils.bounds import MAX_SEED
from utils.commands.experiments.repeated_runs import rotated, then_findings
from utils.commands.experiments.server_race import (
    HEADINGS,
    MOST_FAILURES,
    OPTIONAL,
    OTHER_REASON,
    SHOWN_PROMPTS,
    Numbered,
    ServerResult,
    findings_of,
    prompt_results,
    speedups_by_prompt,
    warm_up_arms,
    with_target,
)
from utils.commands.verdicts.passes import MOST_PASSES, Passes, ends_first_pass, interval_so_far
from utils.commands.verdicts.plan import PromptPlan
from utils.commands.verdicts.timing import (
    SELECTION_SECONDS,
    TOTAL_SECONDS,
    Stopwatch,
    run_length,
    run_seconds,
)
from utils.commands.verdicts.wording import answer, more_prompts, tasks, without_blanks
from utils.comparison.arms import Arm
from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.harness import Harness, comparable_servers
from utils.comparison.reports import Finding, Note, Progress, Report, ReportEvent, ReportTable, shortened
from utils.comparison.runs import Run, row_name
from utils.comparison.speed_claims import FASTER, SpeedClaim
from utils.comparison.strategies import is_greedy
from utils.config.setting_table import setting_fields
from utils.config.settings import Settings
from utils.errors import UserError
from utils.servers.address import TARGET
from utils.servers.connection import Connection
from utils.text import count_of

RECORD = "server_verdict"
PROBE_TOKENS = 16
NO_CANDIDATE = (
    "no server can be compared: /server add NAME URL baseline=NAME says which other server on the same host is without "
    "speculation."
)
GONE = f"{MOST_FAILURES} prompts in a row have no answer, so the measurement ended here."
NONE_LEFT = "No prompt is left, so the measurement ended here."
NO_SPEEDUP = "no speed-up could be measured: {} or its baseline gives neither token ids nor usage figures."
NOT_COMPARED = "texts were not compared, because they are sampled: /server text {} compares greedy ones"
Events = Generator[ReportEvent, None, None]
Row = Mapping[str, Any]


def server_verdict(harness: Harness, settings: Settings, plan: PromptPlan) -> Report:
    """The report. Raises UserError if no server has a baseline on its own host."""
    if not (candidates := comparable_servers(harness)):
        raise UserError(NO_CANDIDATE)
    run = ServerVerdict(harness, settings, plan, candidates)
    only = f'"{shortened(plan.measured[0].text)}"' if len(plan.measured) == 1 else plan.named(len(plan.measured))
    return Report(
        RECORD,
        plan.source,
        settings,
        HEADINGS[1:],
        run.events(),
        lambda findings: sentences(findings[-1].figures),
        charts=charts,
        tables=run.tables,
        optional=OPTIONAL,
        title=f"/verdict on {only}, on servers",
    )


@dataclass(slots=True)
class ServerVerdict:
    """One verdict. `settings` are the session's.

    `results` are those of the measurement. `considered` has each candidate's speed-ups on the tuning prompts, by row
    name.
    """

    harness: Harness
    settings: Settings
    plan: PromptPlan
    candidates: Sequence[Connection]
    clock: Stopwatch = field(default_factory=Stopwatch.start)
    used: Settings = field(default_factory=Settings)
    results: list[ServerResult] = field(default_factory=list)
    considered: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def events(self) -> Iterator[ReportEvent]:
        yield from then_findings(self._measure(), self._findings)

    def _measure(self) -> Events:
        self.clock = Stopwatch.start()
        yield Progress("warming up the servers ...")
        self._warm_up()
        chosen = self.candidates[0]
        if len(self.candidates) > 1:
            yield from self._choose()
            chosen = max(self.candidates, key=self._preference)
        yield from self._run_passes(chosen)

    def _warm_up(self) -> None:
        """Send every server a request, and choose the length of the answers by the slowest of them."""
        first = (1, replace(self.plan.tuning[0], later=()))
        arms = list({arm.name: arm for one in self.candidates for arm in self._arms(one)}.values())
        warm_up_arms(self.harness, self.settings, first, arms)
        probe = replace(self.settings, length=min(PROBE_TOKENS, self.settings.length))
        found, notes = prompt_results(self.harness, probe, first, arms)
        if not found:
            raise UserError(" ".join(sorted(notes)))
        seconds = run_seconds(len(self.plan.measured))
        length = run_length(max(_step(result.run) for result in found), self.settings.length, seconds=seconds)
        self.used = replace(self.settings, length=length)

    def _arms(self, candidate: Connection) -> list[Arm]:
        """The baseline, then the candidate."""
        connections, baseline = self.harness.state.servers.connections, candidate.address.baseline
        servers = [] if baseline in (None, TARGET) else [connections[baseline]]
        return with_target(self.harness, [*servers, candidate])

    def _choose(self) -> Events:
        """Run every candidate beside its baseline on the tuning prompts, while there is time."""
        began = self.clock.seconds
        for turn, prompt in enumerate(self.plan.tuning):
            if turn and self.clock.seconds - began > SELECTION_SECONDS:
                return
            for candidate in rotated(self.candidates, turn):
                name = row_name(candidate.address.name)
                yield Progress(f"choosing a server: {name} on tuning prompt {turn + 1} of {len(self.plan.tuning)} ...")
                arms = rotated(self._arms(candidate), turn)
                found, _ = prompt_results(self.harness, self.used, (turn + 1, prompt), arms)
                ratios = [one.comparison.speedup for one in found if one.run.name == name]
                self.considered.setdefault(name, []).extend(ratio for ratio in ratios if ratio)

    def _preference(self, candidate: Connection) -> float:
        speedups = self.considered.get(row_name(candidate.address.name))
        return mean(map(log, speedups)) if speedups else -1e9

    def _run_passes(self, chosen: Connection) -> Events:
        """Run passes over all prompts until the interval is narrow or the time is over. Raises UserError without a
        result.
        """
        began, prompts = self.clock.seconds, dict(enumerate(self.plan.measured, start=1))
        arms, name = self._arms(chosen), row_name(chosen.address.name)
        for number in range(MOST_PASSES):
            # Each pass has other random numbers: repeats of a sampled text must show how much such texts differ.
            settings = replace(self.used, seed=(self.used.seed + 1 + number) % (MAX_SEED + 1))
            failures, count = 0, len(prompts)
            for place, (prompt_number, prompt) in enumerate(list(prompts.items())):
                if not number and ends_first_pass(len(self._groups(name)), self.clock.seconds):
                    return
                yield Progress(self._progress(name, place, count, number=number, began=began))
                order = rotated(arms, place + number)
                problems = self._add(settings, (prompt_number, prompt), order, repeat=number)
                yield from map(Note, problems)
                failures = failures + 1 if problems else 0
                if problems:
                    del prompts[prompt_number]
                if failures == MOST_FAILURES or not prompts:
                    yield from self._give_up(GONE if prompts else NONE_LEFT)
                    return
            groups = self._groups(name)
            if not groups:
                raise UserError(NO_SPEEDUP.format(name))
            interval = interval_so_far(groups, divided=self.plan.divided)
            passes = Passes(number + 1, len(prompts), self.plan.divided)
            if passes.are_enough(interval, self.clock.seconds, began):
                return

    def _add(self, settings: Settings, numbered: Numbered, order: Sequence[Arm], *, repeat: int) -> list[str]:
        """Add the answers to a prompt if both servers answered. Returns the problems.

        Earlier results are kept.
        """
        found, problems = prompt_results(self.harness, settings, numbered, order)
        if not problems:
            self.results.extend(replace(result, repeat=repeat) for result in found)
        self.notes.extend(sorted(problems))
        return sorted(problems)

    def _give_up(self, why: str) -> Iterator[ReportEvent]:
        """Report why no further prompt is sent. Raises UserError if nothing was measured."""
        if not self.results:
            raise UserError(f"none of the prompts could be measured. {self.notes[0]}")
        self.notes.append(why)
        yield Note(why)

    def _groups(self, name: str) -> list[list[float]]:
        return speedups_by_prompt([result for result in self.results if result.run.name == name], "speedup")

    def _progress(self, name: str, place: int, prompts: int, *, number: int, began: float) -> str:
        interval = interval_so_far(self._groups(name), divided=self.plan.divided)
        parts = [f"{interval.estimate:.2f}x so far"] if interval else []
        again = f", pass {number + 1}" if number else ""
        parts.append(f"{name}, prompt {place + 1} of {prompts}{again}")
        if left := self._seconds_left(number * prompts + place, prompts, began):
            parts.append(f"at most {left:.0f} s left")
        return " · ".join(parts)

    def _seconds_left(self, done: int, prompts: int, began: float) -> float | None:
        """Estimated seconds until the end of the last pass that fits into the time."""
        if not done:
            return None
        spent = self.clock.seconds - began
        whole = spent / done * prompts
        passes = min(MOST_PASSES, max(1, int((TOTAL_SECONDS - began) / whole))) if whole else 1
        return max(1.0, passes * whole - spent)

    def _findings(self) -> Iterator[Finding]:
        if not any(result.comparison.speedup for result in self.results):
            return
        names = list(dict.fromkeys(result.run.name for result in self.results))
        several = len({result.task for result in self.results}) > 1
        sample = BenchmarkSample.chosen(self.plan.measured, self.plan.total)
        found = list(findings_of(self.results, names, sample, with_tasks=False))
        overall = [one for one in found if one.figures["task"] == found[-1].figures["task"]]
        by_task = [one.figures for one in found if one not in overall] if several else []
        # The server that is judged comes last.
        for finding in sorted(overall, key=lambda one: one.figures["baseline"] is not None):
            yield replace(finding, figures=self._figures(dict(finding.figures), by_task))

    def _figures(self, row: dict[str, Any], by_task: Sequence[Any]) -> dict[str, Any]:
        """A row with further figures for the sentences."""
        groups = row["speedups_by_prompt"]
        repeated = bool(groups) and not self.plan.divided and min(map(len, groups)) > 1
        if repeated:
            forwards = row["tokens_per_target_forward"] if row["drafted"] else None
            row |= SpeedClaim.of(groups, tokens_per_forward=forwards, these_prompts=True).figures
        passes = 1 + max((result.repeat for result in self.results), default=0)
        return row | {
            "candidate": row["strategy"],
            "divided": self.plan.divided,
            "source": self.plan.source,
            "left_out": self.plan.left_out,
            "pairs": sum(map(len, groups)),
            "passes": passes,
            "interval_over": "repeats" if repeated or row["prompts"] == 1 else "prompts",
            "greedy": is_greedy(self.settings),
            "processor": setting_fields()["processor"].show(self.settings),
            "length": self.used.length,
            "length_setting": self.settings.length,
            "considered": {name: exp(mean(map(log, known))) for name, known in self.considered.items() if known},
            "skipped": list(self.notes),
            "by_task": [figures for figures in by_task if figures["strategy"] == row["strategy"]],
        }

    def tables(self, findings: Sequence[Finding]) -> list[ReportTable]:
        """The tables of the benchmark whose format the prompts have."""
        rows = [row for finding in findings for row in (*finding.figures["by_task"], finding.figures)]
        sample = BenchmarkSample.chosen(self.plan.measured, self.plan.total)
        return sample.tables(rows, self.used.length) if sample.name else []


def _step(run: Run) -> float:
    """Seconds per token."""
    if run.decode_tokens_per_second:
        return 1 / run.decode_tokens_per_second
    return run.seconds / max(1, run.new_tokens or 1)


def sentences(row: Row) -> list[str]:
    """All sentences, the answer first. `row` has the figures of the candidate's finding."""
    known = {one["task"]: one for one in row["by_task"] if one["speedup"]}
    lines = [answer(row, texts(row)), *more_prompts(row), conditions(row), *tasks({**row, "tasks": known})]
    if row["verdict"] == FASTER and not row["drafted"]:
        lines.append(OTHER_REASON.format(row["strategy"]))
    return without_blanks([*lines, selection(row), *row["skipped"]])


def texts(row: Row) -> str:
    """Whether the texts are those of the baseline."""
    name = row["strategy"].partition(" ")[2]
    if not row["compared_texts"]:
        return NOT_COMPARED.format(name)
    identical = f"text identical on {row['same_texts']} of {row['compared_texts']}"
    if not (others := row["other_texts_at_prompts"]):
        return identical
    listed = ", ".join(map(str, others[:SHOWN_PROMPTS])) + (", ..." if len(others) > SHOWN_PROMPTS else "")
    return f"{identical} (not on prompt {listed}: /server text {name} examines these)"


def conditions(row: Row) -> str:
    """The conditions of the measurement."""
    passes = f"{row['passes']} pass{'es' * (row['passes'] > 1)} over {row['prompts']} {row['source']}"
    where = passes if row["prompts"] > 1 else count_of(row["pairs"], "repeat")
    shorter = f" (/length is {row['length_setting']})" if row["length"] < row["length_setting"] else ""
    left_out = f" {row['left_out']} further prompts were left out." if row["left_out"] else ""
    return (
        f"Measured: whole requests, one at a time, up to {row['length']} new tokens{shorter}, {row['processor']}, "
        f"{where}, in turns with {row['baseline']}.{left_out} /server load shows many requests at once."
    )


def selection(row: Row) -> str:
    """Which servers were considered, if there were several."""
    if len(row["considered"]) < 2:
        return ""
    shown = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in row["considered"].items())
    where = "other prompts" if row["divided"] else "runs that are not counted"
    return f"Chosen by its speed-up on {where}: {shown}."


def charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-up of each prompt, or of each run if the interval is over repeats: all prompts, then each task."""
    row = findings[-1].figures
    if not row["speedups"]:
        return []
    tasks_rows = row["by_task"] if len(row["by_task"]) > 1 else []
    rows = [(row["strategy"], row), *((one["task"], {**one, "interval": None}) for one in tasks_rows)]
    per_prompt = row["interval_over"] == "prompts"
    return [repeats_chart(rows, "prompt" if per_prompt else "run", row["baseline"])]
