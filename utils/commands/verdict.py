"""/verdict: does speculative decoding help here, with which settings or which server, and is the text the same?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from utils.commands.experiments.races import race_row, then_findings
from utils.commands.shared.registry import ChangeSettings, Command, CommandContext, Outcome
from utils.commands.verdicts.measurement import (
    BUILT_IN,
    Figures,
    Measurement,
    PromptPlan,
    plan_prompts,
    sentences,
    started_clock,
    verdict_table,
)
from utils.commands.verdicts.selection import DrafterSelection, ServerSelection
from utils.comparison.harness import comparable_servers
from utils.comparison.records import Report, ReportEvent, shortened
from utils.comparison.speed_claims import baseline_name
from utils.config.settings import Settings, setting_fields
from utils.errors import UserError
from utils.prompts.prompt_files import ALL_TASKS

APPLY = "apply"


def _verdict(argument: str, context: CommandContext) -> Outcome:
    harness, settings = context.harness, context.settings
    if argument == APPLY:
        return _apply(context)
    plan = plan_prompts(argument, harness.state.prompts)
    servers = harness.state.servers
    kinds: list[type[DrafterSelection] | type[ServerSelection]] = []
    if harness.has_pair or not servers:
        kinds.append(DrafterSelection)
    # Without loaded models, servers that cannot be compared are an error; otherwise they are skipped.
    if servers and (not kinds or comparable_servers(harness)):
        kinds.append(ServerSelection)
    runs = (_VerdictRun(kind(harness, settings), settings, plan) for kind in kinds)
    return [run.report() for run in runs]


def _apply(context: CommandContext) -> Outcome:
    advice = context.harness.state.advice
    if advice is None:
        raise UserError("there is nothing to apply: no /verdict so far has recommended settings.")
    changed = replace(context.settings, **advice)
    shown = (f"/{name} {entry.show(changed)}" for name, entry in setting_fields().items() if name in advice)
    return [ChangeSettings(changed, " ".join(shown))]


@dataclass(slots=True)
class _VerdictRun:
    """One verdict: a candidate is chosen, then it is measured. `settings` are the session's."""

    selection: DrafterSelection | ServerSelection
    settings: Settings
    plan: PromptPlan
    measurement: Measurement | None = None

    def report(self) -> Report:
        servers, count = isinstance(self.selection, ServerSelection), len(self.plan.measured)
        # "On this prompt" must identify the prompt, above all on a page of many results.
        what = f"{count} {self.plan.source}" if count > 1 else f'"{shortened(self.plan.measured[0].text)}"'
        table = verdict_table(servers=servers)
        return table.report(
            *("server_verdict" if servers else "verdict", self.plan.source, self.settings),
            then_findings(self._events(), lambda: map(table.finding, self._rows())),
            conclude=lambda findings: sentences(findings[-1].figures),
            attachment=lambda findings: "\n".join(findings[-1].figures.get("elsewhere", ())),
            transposed=True,
            title=f"/verdict on {what}" + ", on servers" * servers,
        )

    def _events(self) -> Iterator[ReportEvent]:
        self.selection.clock = started_clock()  # it was made with the first of two reports
        self.measurement = yield from self.selection.choose(self.plan)
        yield from self.measurement.run()

    def _rows(self) -> Iterator[Figures]:
        """The baseline, then the candidate."""
        measurement = self.measurement
        if measurement is None or not measurement.speedups:
            return
        row = measurement.candidate_row(self.plan, self.settings)
        row |= self.selection.figures(measurement, row, self.settings)
        own = measurement.baseline_results
        yield {**race_row(ALL_TASKS, own), "name": baseline_name(row), "runs": len(own)}
        yield row


VERDICT = Command(
    "verdict",
    "[FILE]",
    "the answer, and the best settings",
    _verdict,
    group="does it help?",
    rank=1,
    about="Find the best drafter and /gamma by replay on a few prompts, then measure it against the target alone on "
    "other prompts, in turns, until the answer is clear. It takes two to three minutes, or as long as one run of "
    "every prompt takes; Ctrl-C keeps what was measured. Without a FILE the prompts are those typed so far, or 14 "
    "built-in ones. Servers with a baseline on their host are measured against it in the same way. If drafts pay, "
    "the answer ends with the settings of vLLM, SGLang, llama.cpp and transformers.",
    example=(
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
    words={BUILT_IN: "14 prompts over seven tasks", APPLY: "use the recommended settings"},
    files=("",),
)
