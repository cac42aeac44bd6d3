"""/verdict: does speculative decoding help here, with which settings or which server, and is the text the same?"""

from collections.abc import Iterator
from dataclasses import replace

from utils.commands.experiments.races import race_row, then_rows
from utils.commands.shared.registry import ChangeSettings, Command, CommandContext, Outcome
from utils.commands.verdicts import measurement
from utils.commands.verdicts.selection import DrafterSelection, ServerSelection
from utils.comparison.harness import comparable_servers
from utils.comparison.records import Report, shortened
from utils.comparison.speed_claims import baseline_name
from utils.config.settings import Settings, setting_fields
from utils.errors import UserError
from utils.prompts.prompt_files import ALL_TASKS

APPLY = "apply"


def _verdict(argument: str, context: CommandContext) -> Outcome:
    harness, settings = context.harness, context.settings
    if argument == APPLY:
        return _apply(context)
    plan = measurement.plan_prompts(argument, harness.state.prompts)
    servers = harness.state.servers
    kinds: list[type[DrafterSelection] | type[ServerSelection]] = []
    if harness.has_pair or not servers:
        kinds.append(DrafterSelection)
    # Without loaded models, servers that cannot be compared are an error; otherwise they are skipped.
    if servers and (not kinds or comparable_servers(harness)):
        kinds.append(ServerSelection)
    return [_report(kind(harness, settings), settings, plan) for kind in kinds]


def _apply(context: CommandContext) -> Outcome:
    advice = context.harness.state.advice
    if advice is None:
        raise UserError("there is nothing to apply: no /verdict so far has recommended settings.")
    changed = replace(context.settings, **advice)
    shown = (f"/{name} {entry.show(changed)}" for name, entry in setting_fields().items() if name in advice)
    return [ChangeSettings(changed, " ".join(shown))]


def _report(selection: DrafterSelection | ServerSelection, settings: Settings, plan: measurement.PromptPlan) -> Report:
    """A candidate is chosen, then it is measured. `settings` are the session's."""
    servers, count = isinstance(selection, ServerSelection), len(plan.measured)
    # "On this prompt" must identify the prompt, above all on a page of many results.
    what = f"{count} {plan.source}" if count > 1 else f'"{shortened(plan.measured[0].text)}"'
    chosen: list[measurement.Measurement] = []

    def measure() -> None:
        chosen.append(selection.choose(plan))
        chosen[0].run()

    def rows() -> Iterator[measurement.Figures]:
        """The baseline, then the candidate."""
        if chosen and chosen[0].speedups:
            row = chosen[0].candidate_row(plan, settings)
            row |= selection.figures(chosen[0], row, settings)
            own = chosen[0].baseline_results
            yield {**race_row(ALL_TASKS, own), "name": baseline_name(row), "runs": len(own)}
            yield row

    return measurement.verdict_table(servers=servers).report(
        *("server_verdict" if servers else "verdict", plan.source, settings, then_rows(measure, rows)),
        conclude=lambda rows: measurement.sentences(rows[-1]),
        attachment=lambda rows: "\n".join(rows[-1].get("elsewhere", ())),
        transposed=True,
        title=f"/verdict on {what}" + ", on servers" * servers,
    )


VERDICT = Command(
    "verdict",
    "[FILE]",
    "the answer, and the best settings",
    _verdict,
    group="does it help?",
    rank=1,
    about="It finds the best drafter and /gamma by replay on a few prompts, then measures it against the target alone "
    "on others, in turns, for two to three minutes, or as long as one run of every prompt takes; Ctrl-C keeps what was "
    "measured. Servers with a baseline on their host are measured against it in the same way. If drafts pay, the "
    "answer ends with the settings of vLLM, SGLang, llama.cpp and transformers.",
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
    words={measurement.BUILT_IN: "14 prompts over seven tasks", APPLY: "use the recommended settings"},
    files=("",),
)
