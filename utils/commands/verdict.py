"""/verdict: does speculative decoding help here, with which settings or which server, and is the text the same?"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import mean
from typing import Any

from utils.commands.experiments.paired_runs import PairedRuns, server_arms
from utils.commands.experiments.race_runs import ONLY_FIRST_TURNS
from utils.commands.experiments.repeated_runs import rotated, then_findings
from utils.commands.shared.outcomes import ChangeSettings, Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.commands.verdicts import wording
from utils.commands.verdicts.elsewhere import equivalent_lines, equivalents
from utils.commands.verdicts.figures import Row, baseline_row, candidate_row, draft_figures, generations
from utils.commands.verdicts.measurement import SELECTION_SECONDS, Measurement, VerdictClock, run_length, run_seconds
from utils.commands.verdicts.plan import BUILT_IN, PromptPlan, plan_prompts, usable_prompts
from utils.commands.verdicts.selection import Selection, VerdictCandidate, best_of_each, kind_name
from utils.comparison.arms import Arm, complete
from utils.comparison.benchmark_tables import BenchmarkSample
from utils.comparison.charts import DotChart, repeats_chart
from utils.comparison.harness import Harness, comparable_servers
from utils.comparison.reports import Finding, Progress, Report, ReportEvent, ReportTable, shortened
from utils.comparison.runs import Run
from utils.comparison.speed_claims import SpeedClaim, baseline_name
from utils.comparison.warm_up import shortened as shorter_settings
from utils.config.setting_table import setting_fields
from utils.config.settings import Settings
from utils.errors import UserError
from utils.metrics.intervals import SLOWER

APPLY = "apply"
PROBE_TOKENS = 16
NO_CANDIDATE = (
    "no server can be compared: /server add NAME URL baseline=NAME says which other server on the same host is without "
    "speculation."
)


def _verdict(argument: str, context: CommandContext) -> Outcome:
    if argument == APPLY:
        return _apply(context)
    harness, settings = context.harness, context.settings
    plan = plan_prompts(argument, harness.state.prompts)
    runs: list[_VerdictRun] = []
    if harness.has_pair or not harness.state.servers:
        runs.append(_LocalVerdict(harness, settings, plan))
    # Without loaded models, servers that cannot be compared are an error; otherwise they are skipped.
    if harness.state.servers and (not runs or comparable_servers(harness)):
        runs.append(_ServerVerdict(harness, settings, plan, candidates=_candidates(harness)))
    return [RunReport(run.report()) for run in runs]


def _candidates(harness: Harness) -> list[tuple[Arm, Arm]]:
    """Baseline and candidate for each server that can be compared. Raises UserError if there is none."""
    connections, servers = harness.state.servers.connections, comparable_servers(harness)
    if not servers:
        raise UserError(NO_CANDIDATE)
    pairs: list[tuple[Arm, Arm]] = []
    for server in servers:
        known = connections.get(server.address.baseline or "")
        baseline, candidate = server_arms(harness, [*([known] if known else []), server])
        pairs.append((baseline, candidate))
    return pairs


def _apply(context: CommandContext) -> Outcome:
    """Use the settings that the last verdict recommended."""
    advice = context.harness.state.advice
    if advice is None:
        raise UserError("there is nothing to apply: no /verdict so far has recommended settings.")
    changed = replace(context.settings, **advice)
    shown = (f"/{name} {entry.show(changed)}" for name, entry in setting_fields().items() if name in advice)
    return [ChangeSettings(changed, " ".join(shown))]


@dataclass(slots=True)
class _VerdictRun(ABC):
    """One verdict: a candidate is chosen, then it is measured. `settings` are the session's."""

    harness: Harness
    settings: Settings
    plan: PromptPlan
    clock: VerdictClock = field(default_factory=VerdictClock.start)
    measurement: Measurement | None = None
    skipped: list[str] = field(default_factory=list)

    def report(self) -> Report:
        """The report."""
        servers = isinstance(self, _ServerVerdict)
        # "On this prompt" must identify the prompt, above all on a page of many results.
        only = f'"{shortened(self.plan.measured[0].text)}"' if len(self.plan.measured) == 1 else ""
        table = wording.verdict_table(servers=servers)
        return Report(
            *("server_verdict" if servers else "verdict", self.plan.source, self.settings, table.headings),
            then_findings(self._measure(), lambda: map(table.finding, self._rows())),
            lambda findings: wording.sentences(findings[-1].figures),
            attachment=self.attachment,
            charts=_charts,
            tables=self.tables,
            transposed=True,
            title=f"/verdict on {only or self.plan.named(len(self.plan.measured))}" + ", on servers" * servers,
        )

    @abstractmethod
    def _measure(self) -> Iterator[ReportEvent]:
        """Choose a candidate, and measure it."""

    @abstractmethod
    def _figures(self, measurement: Measurement, row: Row) -> Row:
        """The figures that only this kind of candidate has. `row` has the others."""

    def _rows(self) -> Iterator[Row]:
        """The baseline, then the candidate."""
        measurement = self.measurement
        if measurement is None or not measurement.speedups:
            return
        row = candidate_row(measurement, self.plan, self.settings)
        row |= self._figures(measurement, row)
        yield baseline_row(measurement, baseline_name(row))
        yield row

    def tables(self, findings: Sequence[Finding]) -> list[ReportTable]:
        """The tables of the benchmark whose format the prompts have."""
        row = findings[-1].figures
        if not row["benchmark"]:
            return []
        name = str(row["benchmark"][0]["benchmark"]["name"])
        return BenchmarkSample(name, row["prompts"], self.plan.total).tables(row["benchmark"], row["length"])

    def attachment(self, findings: Sequence[Finding]) -> str:
        """Data to copy."""
        return ""


@dataclass(slots=True)
class _LocalVerdict(_VerdictRun):
    """A verdict on the drafters of the loaded pair."""

    selection: Selection | None = None
    chosen: VerdictCandidate | None = None

    def _measure(self) -> Iterator[ReportEvent]:
        # A conversation would need the texts of its earlier turns, so every prompt is a first turn.
        settings = replace(self.settings, turns=False)
        self.clock = VerdictClock.start()
        measured, self.skipped = usable_prompts(self.harness, settings, self.plan.measured)
        tuning, _ = usable_prompts(self.harness, settings, self.plan.tuning)
        if not measured or not tuning:
            raise UserError(f"none of the prompts can be used. {' '.join(self.skipped[:1])}")
        if not settings.uses_chat and any(prompt.later for prompt in self.plan.measured):
            self.skipped.append(ONLY_FIRST_TURNS)
        self.selection = Selection(self.harness, settings, list(tuning.values()), self.clock)
        yield from self.selection.run()
        self.chosen = self.selection.chosen()
        length = run_length(self.selection.step, settings.length, seconds=run_seconds(len(measured)))
        self.measurement = Measurement(
            replace(self.harness.arm(self.chosen.strategy), timed=True),
            self.harness.arm(self.harness.baseline),
            self.chosen.short_label(self.harness.pair),
            self.chosen.settings(self.selection.settings, length),
            measured,
            self.plan.divided,
            self.clock,
        )
        yield from self.measurement.run()

    def _figures(self, measurement: Measurement, row: Row) -> Row:
        selection, chosen, pair = self.selection, self.chosen, self.harness.pair
        assert selection is not None and chosen is not None and chosen.strategy.kind is not None
        considered = best_of_each(selection.candidates(), pair)
        row = {
            "name": chosen.short_label(pair),
            "candidate": chosen.label(pair),
            **chosen.figures(pair),
            **draft_figures(generations(measurement), row["speedup"]),
            "extra_memory": (pair.drafter_memory or 0) if chosen.strategy.kind.uses_loaded else 0,
            "must_be_the_targets": chosen.strategy.repeats_target(self.settings),
            "engine_verified": pair.engine.state.verified,
            "verify": self.settings.verify,
            "kind_name": kind_name(chosen.strategy, pair),
            "commands": list(chosen.commands(self.settings)),
            "in_use": chosen.is_used_by(self.settings),
            "best_fixed_gamma": selection.best_fixed_gamma(chosen.strategy),
            "considered": [{"name": kind_name(one.strategy, pair), **one.figures(pair)} for one in considered],
            "tried": [kind_name(one.strategy, pair) for one in selection.tried],
            "trials": len(selection.speeds),
            "not_tried": selection.not_replayed(),
            "skipped": [*self.skipped, *measurement.problems, *selection.cannot_draft()],
            **{name: row[name] for name in ("verdict", "interval", "speedup", "without_gain")},
        }
        self.harness.state.advice = self._advice(row)
        return row

    def _advice(self, row: Row) -> Mapping[str, Any] | None:
        """The recommended settings, if the answer is clear."""
        if self.chosen is not None and wording.helps(row):
            return self.chosen.changes
        return {"speculative": False, "ngram": False} if row["verdict"] == SLOWER else None

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


@dataclass(slots=True)
class _ServerVerdict(_VerdictRun):
    """A verdict on the servers that have a baseline. `candidates` are those with their baselines.

    No figure comes from the choice between them: the best of several would look better than it is on the prompts on
    which it was chosen. `considered` has each candidate's speed-ups on the tuning prompts.
    """

    candidates: Sequence[tuple[Arm, Arm]] = ()
    considered: dict[str, list[float]] = field(default_factory=dict)

    def _measure(self) -> Iterator[ReportEvent]:
        self.clock = VerdictClock.start()
        yield Progress("warming up the servers ...")
        used = self._with_length()
        baseline, candidate = self.candidates[0]
        if len(self.candidates) > 1:
            yield from self._choose(used)
            baseline, candidate = max(self.candidates, key=self._preference)
        prompts = dict(enumerate(self.plan.measured, start=1))
        parts = (candidate, baseline, candidate.name, used, prompts)
        self.measurement = Measurement(*parts, self.plan.divided, self.clock)
        yield from self.measurement.run()

    def _with_length(self) -> Settings:
        """Warm every server up, and choose the length of the answers by the slowest of them."""
        text, settings = self.plan.tuning[0].text, self.settings
        arms = {arm.name: arm for pair in self.candidates for arm in pair}.values()
        probe = replace(settings, length=min(PROBE_TOKENS, settings.length))
        steps: list[float] = []
        problems: list[str] = []
        for arm in arms:
            try:
                complete(arm.run(text, shorter_settings(settings)))  # the first answer may be slow
                steps.append(_step(complete(arm.run(text, probe))))
            except UserError as error:
                problems.append(str(error))
        if not steps:
            raise UserError(" ".join(problems))
        length = run_length(max(steps), settings.length, seconds=run_seconds(len(self.plan.measured)))
        return replace(settings, length=length)

    def _choose(self, used: Settings) -> Iterator[Progress]:
        """Run every candidate beside its baseline on the tuning prompts, while there is time."""
        began = self.clock.seconds
        for turn, prompt in enumerate(self.plan.tuning):
            if turn and self.clock.seconds - began > SELECTION_SECONDS:
                return
            for pair in rotated(self.candidates, turn):
                name = pair[1].name
                yield Progress(f"choosing a server: {name} on tuning prompt {turn + 1} of {len(self.plan.tuning)} ...")
                try:
                    runs = [(arm, (complete(arm.run(prompt.text, used)),)) for arm in rotated(pair, turn)]
                except UserError:
                    continue  # a server without an answer is not preferred
                if speedup := PairedRuns.of(pair[1], runs, used).speedup:
                    self.considered.setdefault(name, []).append(speedup)

    def _preference(self, pair: tuple[Arm, Arm]) -> float:
        speedups = self.considered.get(pair[1].name)
        return mean(map(log, speedups)) if speedups else -1e9

    def _figures(self, measurement: Measurement, row: Row) -> Row:
        forwards = row["tokens_per_target_forward"] if row["drafted"] else None
        claim = SpeedClaim.of(measurement.speedups, tokens_per_forward=forwards, these_prompts=measurement.is_repeated)
        return {
            "name": measurement.candidate.name,
            "candidate": measurement.candidate.name,
            **claim.figures,
            "considered": {name: exp(mean(map(log, known))) for name, known in self.considered.items() if known},
            "skipped": measurement.problems,
        }


def _step(run: Run) -> float:
    """Seconds per token."""
    if run.decode_tokens_per_second:
        return 1 / run.decode_tokens_per_second
    return run.seconds / max(1, run.new_tokens or 1)


def _charts(findings: Sequence[Finding]) -> list[DotChart]:
    """The speed-up of each prompt, or of each run if the interval is over repeats: all prompts, then each task."""
    row = findings[-1].figures
    per_prompt = row["interval_over"] == "prompts"
    tasks = {task: {**one, "interval": None} for task, one in row["tasks"].items()} if len(row["tasks"]) > 1 else {}
    rows = {row["name"]: row, **tasks}
    if not per_prompt:
        rows = {name: {**one, "speedups_by_prompt": ()} for name, one in rows.items()}
    return [repeats_chart(list(rows.items()), "prompt" if per_prompt else "run", baseline_name(row))]


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
    words={BUILT_IN: "12 prompts over six tasks", APPLY: "use the recommended settings"},
    files=("",),
)
