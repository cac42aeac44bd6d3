"""/verdict: the command, its report and its record."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from utils.commands.experiments.repeated_runs import then_findings
from utils.commands.experiments.turn_runs import ONLY_FIRST_TURNS, has_skipped_turns
from utils.commands.shared.outcomes import ChangeSettings, Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.commands.verdicts import wording
from utils.commands.verdicts.elsewhere import equivalent_lines, equivalents
from utils.commands.verdicts.measurement import Measurement
from utils.commands.verdicts.plan import BUILT_IN, PromptPlan, plan_prompts, ready_prompts
from utils.commands.verdicts.record import Measured, Row
from utils.commands.verdicts.selection import Selection
from utils.commands.verdicts.server_verdict import server_verdict
from utils.commands.verdicts.timing import Stopwatch, run_length, run_seconds
from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.harness import Harness, comparable_servers
from utils.comparison.reports import Finding, Report, ReportEvent, ReportTable, shortened
from utils.config.setting_table import setting_fields
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.intervals import SLOWER

APPLY = "apply"


def _verdict(argument: str, context: CommandContext) -> Outcome:
    if argument == APPLY:
        return _apply(context)
    harness, plan = context.harness, plan_prompts(argument, context.harness.state.prompts)
    reports = [_local(plan, context)] if harness.has_pair or not harness.state.servers else []
    # Without loaded models, servers that cannot be compared are an error; otherwise they are skipped.
    if harness.state.servers and (not reports or comparable_servers(harness)):
        reports.append(server_verdict(harness, context.settings, plan))
    return list(map(RunReport, reports))


def _local(plan: PromptPlan, context: CommandContext) -> Report:
    """The report of the local strategies."""
    run = VerdictRun(context.harness, context.settings, plan)
    # "On this prompt" must identify the prompt, above all on a page of many results.
    only = f'"{shortened(plan.measured[0].text)}"' if len(plan.measured) == 1 else ""
    title = f"/verdict on {only or plan.named(len(plan.measured))}"
    return Report(
        "verdict",
        plan.source,
        context.settings,
        wording.HEADINGS,
        run.events(),
        run.conclusion,
        attachment=run.attachment,
        charts=_charts,
        tables=run.tables,
        transposed=True,
        title=title,
    )


def _charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-up of each prompt, or of each run if the interval is over repeats: all prompts, then each task."""
    row = findings[-1].figures
    per_prompt, each = row["interval_over"] == "prompts", row["by_prompt"]
    names = ("speedup", "interval", "accepted", "without_gain")
    claims = {row["name"]: {name: row[name] for name in names}}
    groups = {row["name"]: each}
    if len(row["tasks"]) > 1:
        claims |= {task: {**figures, "interval": None} for task, figures in row["tasks"].items()}
        groups |= {task: [one for one in each if str(one["task"]) == task] for task in row["tasks"]}
    rows = [(name, _chart_row(group, claims[name], per_prompt=per_prompt)) for name, group in groups.items()]
    return [repeats_chart(rows, "prompt" if per_prompt else "run")]


def _chart_row(group: Sequence[Row], claim: Row, *, per_prompt: bool) -> Row:
    known = [speedups for one in group if (speedups := [speedup for speedup in one["speedups"] if speedup])]
    return {
        "strategy": "recommended",
        "speedups": list(chain(*known)),
        "speedups_by_prompt": known if per_prompt else (),
        "without_gain": not claim["accepted"],
        **claim,
    }


def _apply(context: CommandContext) -> Outcome:
    """Use the settings that the last verdict recommended."""
    advice = context.harness.state.advice
    if advice is None:
        raise UserError("there is nothing to apply: no /verdict so far has recommended settings.")
    changed = replace(context.settings, **advice)
    shown = (f"/{name} {entry.show(changed)}" for name, entry in setting_fields().items() if name in advice)
    return [ChangeSettings(changed, " ".join(shown))]


@dataclass(slots=True)
class VerdictRun:
    """One verdict: first selection, then measurement."""

    harness: Harness
    settings: Settings
    plan: PromptPlan
    selection: Selection | None = None
    measurement: Measurement | None = None
    skipped: tuple[str, ...] = ()

    def events(self) -> Iterator[ReportEvent]:
        yield from then_findings(self._measure(), self._findings)

    def _measure(self) -> Iterator[ReportEvent]:
        clock = Stopwatch.start()
        # A conversation would need the texts of its earlier turns, so every prompt is a first turn.
        settings = replace(self.settings, turns=False)
        measured, skipped = ready_prompts(self.harness, settings, self.plan.measured)
        tuning, _ = ready_prompts(self.harness, settings, self.plan.tuning)
        only_first = (ONLY_FIRST_TURNS,) if has_skipped_turns(self.plan.measured, settings) else ()
        self.skipped = (*skipped, *only_first)
        if not measured or not tuning:
            raise UserError(f"none of the prompts can be used. {' '.join(skipped[:1])}")
        self.selection = Selection(self.harness, settings, tuning, clock)
        yield from self.selection.run()
        chosen = self.selection.chosen()
        length = run_length(self.selection.step, settings.length, seconds=run_seconds(len(measured)))
        used = chosen.settings(self.selection.settings, length)
        self.measurement = Measurement(self.harness, used, chosen, measured, self.plan.divided, clock)
        yield from self.measurement.run()

    def _findings(self) -> Iterator[Finding]:
        if self.selection is None or self.measurement is None or not self.measurement.finished_pairs:
            return
        measured = Measured(
            self.harness, self.settings, self.plan, self.selection, self.measurement, skipped=self.skipped
        )
        row, target = measured.candidate_row(), measured.target_row()
        self.harness.state.advice = self._advice(row)
        yield Finding(wording.cells(target, memory=None), target)
        yield Finding(wording.cells(row, memory=row["extra_memory"]), row)

    def _advice(self, row: Row) -> Mapping[str, Any] | None:
        """The recommended settings, if the answer is clear."""
        assert self.measurement is not None
        if wording.helps(row):
            return self.measurement.candidate.changes
        return {"speculative": False, "ngram": False} if row["verdict"] == SLOWER else None

    def conclusion(self, findings: Sequence[Finding]) -> list[str]:
        return wording.without_blanks(wording.sentences(findings[-1].figures))

    def tables(self, findings: Sequence[Finding]) -> list[ReportTable]:
        """The tables of the benchmark whose format the prompts have."""
        row = findings[-1].figures
        if not row["benchmark"]:
            return []
        name = str(row["benchmark"][0]["benchmark"]["name"])
        return BenchmarkSample(name, row["prompts"], self.plan.total).tables(row["benchmark"], row["length"])

    def attachment(self, findings: Sequence[Finding]) -> str:
        """Equivalent settings of other programs, to copy, if the candidate is recommended."""
        row, pair = findings[-1].figures, self.harness.pair
        if not wording.helps(row):
            return ""
        gamma = row["best_fixed_gamma"] if row["gamma"] is None else row["gamma"]
        rows = equivalents(
            str(row["drafter_kind"]),
            gamma,
            drafter=str(pair.drafter_name),
            same_tokenizer=pair.drafter_tokenizer is None,
        )
        return "\n".join(["Equivalent settings elsewhere:", *equivalent_lines(rows)])


VERDICT = Command(
    "verdict",
    "[FILE]",
    "the answer, and the best settings",
    _verdict,
    group="does it help?",
    rank=1,
    page=Page(
        "Find the best drafter and /gamma by replay on a few prompts, then measure it against the target alone on "
        "other prompts, in turns, until the answer is clear. It takes two to three minutes, or as long as one run of "
        "every prompt takes; Ctrl-C keeps what was measured. Without a FILE the prompts are those typed so far, or 12 "
        "built-in ones. Servers with a baseline on their host are measured against it in the same way.",
        (
            "> /verdict",
            "Use the head with /gamma auto: 1.52x target-only (95 % interval 1.41",
            "to 1.63 over 12 prompts), text identical on 12 of 12.",
        ),
        syntax=(
            "/verdict          on the prompts typed so far, or else on the built-in ones",
            "/verdict FILE     on the prompts of a file: one per line, or JSON lines",
            "/verdict builtin  on the built-in prompts",
            "/verdict apply    use the settings that the last answer recommends",
        ),
        see_also=("race", "whatif", "why"),
    ),
    words=(BUILT_IN, APPLY),
    meanings={BUILT_IN: "12 prompts over six tasks", APPLY: "use the recommended settings"},
    files=("",),
)
