"""/texts: the last texts side by side, where and why they differ from the target's, and data for a bug report."""

import json
from collections.abc import Iterator, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from utils.commands.shared.outcomes import Outcome, Reply, RunReport, ShowTexts
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.arms import ComparedRun
from utils.comparison.records import SERVER, divergence_figures, run_records
from utils.comparison.reports import Column, Finding, Report
from utils.comparison.run_texts import candidate_piece
from utils.comparison.session_state import LastPrompt, divergence_of, own_conversations, unlike_target
from utils.comparison.strategies import Strategy
from utils.errors import UserError
from utils.metrics.divergence import Cause, Divergence
from utils.metrics.results import first_difference
from utils.text import count_of

HEADINGS = (
    "strategy",
    "token",
    "its token",
    "target's token",
    "target's top two",
    "gap in logits",
    "effect of verify width",
    "cause",
)
EXPLANATIONS = {
    Cause.SAMPLING: "sampling: both tokens were drawn from the same distribution with different random numbers, "
    "as /verify {rule} allows. /verify coupled gives the target's own text.",
    Cause.ROUNDING: "rounding tie: the two runs computed this position with different verify widths. "
    "That changes the logits enough to decide between the two tokens.",
    Cause.QUANTIZATION: "quantization: under bnb-int8 the logits depend on the verify width by more than rounding, and "
    "the two runs computed this position with different widths. Other quantizations do not do that.",
    Cause.UNEXPLAINED: "unexplained: this should not happen. Please report it, with the line of data that follows:",
}
OWN_CONVERSATIONS = "nothing to compare: the conversations differ from the target's. /turns new begins new ones."
NO_RUNS = "there is nothing to compare: the last prompt needs finished runs of the target and of another strategy."


def _texts(argument: str, context: CommandContext) -> Outcome:
    columns = _columns(context)
    try:
        return [*columns, *_divergence(context)]
    except UserError as error:
        # The texts are worth showing even without a text to compare them with.
        return [*columns, Reply(str(error))]


def _columns(context: CommandContext) -> Outcome:
    last = context.harness.state.last or context.harness.last()  # the latter raises UserError
    if not last.compared:
        raise UserError("no strategy answered the last prompt: send it again.")
    groups: dict[tuple[int, ...] | str, list[ComparedRun]] = {}
    for entry in sorted(last.compared, key=lambda entry: entry.run.name != context.harness.baseline.name):
        key = entry.run.tokens if entry.run.is_local and entry.run.tokens is not None else entry.run.text
        groups.setdefault(key, []).append(entry)
    return [ShowTexts([_column(last, group) for group in groups.values()])]


def _column(last: LastPrompt, group: Sequence[ComparedRun]) -> Column:
    """A column for arms that generated the same text, marked from the first difference from the baseline's."""
    _, run, comparison = group[0]
    names = [entry.run.name for entry in group]
    tokens = "tokens unknown" if run.new_tokens is None else count_of(run.new_tokens, "token")
    about = f"{tokens}, {run.finish}"
    other = next((entry.run for entry in last.compared if entry.run.name == run.baseline), None)
    if other is None or comparison.first_difference is None:
        return Column(names, about, run.text)
    # In characters: two different tokens may begin with the same characters.
    shared = first_difference(run.text, other.text)
    whose = "" if run.is_local else f"{other.name} from "
    about += f", differs from {whose}{comparison.unit} {comparison.first_difference + 1}"
    return Column(names, about, run.text[:shared], "" if shared is None else run.text[shared:])


def _divergence(context: CommandContext) -> Outcome:
    last = context.harness.last()
    others = [
        (strategy, comparison)
        for strategy, _, comparison in last.local
        if strategy.lossless and not strategy.is_baseline
    ]
    # None without a finished run of the target, or if the conversation differs from the target's.
    if all(comparison.same is None for _, comparison in others):
        raise UserError(OWN_CONVERSATIONS if own_conversations(last) else NO_RUNS)
    if not unlike_target(last):
        names = " and ".join(strategy.name for strategy, comparison in others if comparison.same)
        return [Reply(f"{names}: the same tokens as target-only.")]
    findings = _findings(last, context.harness.state.rounding)
    conclude, attachment = partial(_conclusion, last), partial(replay_data, last)
    settings = last.job.settings
    report = Report("divergence", last.text, settings, HEADINGS, findings, conclude, attachment, transposed=True)
    return [RunReport(report)]


def _findings(last: LastPrompt, rounding: float) -> Iterator[Finding]:
    for strategy, run in unlike_target(last):
        divergence = divergence_of(last, strategy, run, rounding)
        figures = {"strategy": strategy.name, **divergence_figures(divergence)}
        yield Finding(_cells(last.job.pair.tokenizer, strategy, divergence), figures)


def _cells(tokenizer: PreTrainedTokenizerBase, strategy: Strategy, divergence: Divergence) -> tuple[str, ...]:
    candidates = (divergence.ours, divergence.theirs, *divergence.highest)
    ours, theirs, *highest = (candidate_piece(tokenizer, candidate) for candidate in candidates)
    return (
        strategy.name,
        str(divergence.position + 1),
        ours,
        theirs,
        ", ".join(highest),
        f"{divergence.gap:.4g}",
        "-" if divergence.rounding is None else f"{divergence.rounding:.2g}",
        divergence.cause.value,
    )


def _conclusion(last: LastPrompt, findings: Sequence[Finding]) -> list[str]:
    causes = {finding.figures["cause"] for finding in findings}
    rule = last.job.settings.verify
    return [sentence.format(rule=rule) for cause, sentence in EXPLANATIONS.items() if cause in causes]


def replay_data(last: LastPrompt, findings: Sequence[Finding]) -> str:
    """One line of JSON to reproduce an unexplained divergence. It is empty if all are explained."""
    if all(finding.figures["cause"] != Cause.UNEXPLAINED for finding in findings):
        return ""
    rounds = {
        strategy.name: [(step.drafted, step.accepted, step.token) for step in run.steps]
        for strategy, run, _ in last.local
        if strategy.drafts and last.jobs[strategy.name].is_same_request(last.job)
    }
    return json.dumps(
        {
            "prompt_ids": last.job.prompt,
            "divergences": [finding.figures for finding in findings],
            "rounds": rounds,
            "runs": [row for row in run_records(last, {}, last.job.pair) if row[SERVER] is None],
        }
    )


TEXTS = Command(
    "texts",
    "",
    "the texts side by side, why they differ",
    _texts,
    group="results",
    rank=1,
    page=Page(
        "The last texts side by side, marked where they differ from the text of the target. Below them: the first "
        "token that differs, its probabilities, and the cause: sampling or rounding.",
        ("> /texts", "ngram, target   speculative", "The sea         The sea »is"),
        see_also=("text", "verify", "audit"),
    ),
)
