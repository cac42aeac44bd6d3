"""The second part of /texts: where and why the last texts differ from the target's, with data to report a bug."""

import json
from collections.abc import Iterator, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from utils.commands.outcomes import Outcome, Reply, RunReport
from utils.commands.registry import Command, CommandContext, Page
from utils.comparison.last_prompt import LastPrompt, divergence_of, own_conversations, unlike_target
from utils.comparison.records import divergence_figures, generation_records
from utils.comparison.reports import Finding, Report
from utils.comparison.strategies import Strategy
from utils.errors import UserError
from utils.metrics.divergence import Cause, Divergence
from utils.screen.divergence_words import candidate_piece

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


def _divergence(argument: str, context: CommandContext) -> Outcome:
    last = context.harness.last()
    others = [
        (strategy, comparison)
        for strategy, _, comparison in last.compared
        if strategy.lossless and not strategy.is_baseline
    ]
    # None: no finished run of the target, or a conversation that differs from the target's.
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
    """What is needed to reproduce an unexplained divergence, as one line of JSON, or "" if all are explained."""
    if all(finding.figures["cause"] != Cause.UNEXPLAINED for finding in findings):
        return ""
    rounds = {
        strategy.name: [(step.drafted, step.accepted, step.token) for step in run.steps]
        for strategy, run, _ in last.compared
        if strategy.drafts and last.jobs[strategy.name].is_same_request(last.job)
    }
    return json.dumps(
        {
            "prompt_ids": last.job.prompt,
            "divergences": [finding.figures for finding in findings],
            "rounds": rounds,
            "runs": generation_records(last, {}),
        }
    )


DIVERGENCE = Command(
    "divergence",
    "",
    "where and why the last texts differ from the target's",
    _divergence,
    page=Page("Where and why the last texts differ from the target's.", ("> /divergence",)),
    instead="texts",
)
