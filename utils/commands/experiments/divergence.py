"""/divergence: why the last prompt's texts part, in full, and what to send where it is not explained."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Last, divergence_of, own_conversations, unlike_target
from utils.comparison.records import divergence_figures, generation_records
from utils.comparison.reports import Finding, Report
from utils.comparison.strategies import Strategy
from utils.errors import UserError
from utils.metrics.divergence import Cause, Divergence
from utils.screen.renderer import candidate_piece

HEADINGS = (
    "strategy",
    "token",
    "said",
    "target said",
    "target's highest",
    "gap in logits",
    "widths move logits by",
    "cause",
)


def _divergence(argument: str, situation: Situation) -> Outcome:
    last = situation.bench.last()
    others = [
        (strategy, comparison)
        for strategy, _, comparison in last.compared
        if strategy.lossless and not strategy.is_baseline
    ]
    if all(comparison.same is None for _, comparison in others):
        if own_conversations(last):
            raise UserError(
                "there is nothing to compare: the conversations are not the target's own; /reset begins new ones."
            )
        raise UserError(
            "there is nothing to compare: the last prompt needs finished runs of the target and of another strategy."
        )
    if not unlike_target(last):
        names = " and ".join(strategy.name for strategy, comparison in others if comparison.same)
        return Outcome(reply=f"{names}: the same tokens as target-only.")
    findings = _findings(last, situation.bench.memory.rounding)
    conclude, attachment = partial(_conclusion, last), partial(_replay, last)
    return Outcome(
        report=Report(
            "divergence", last.text, last.job.settings, HEADINGS, findings, conclude, attachment, upright=True
        )
    )


def _findings(last: Last, rounding: float) -> Iterator[Finding]:
    for strategy, run in unlike_target(last):
        found = divergence_of(last, strategy, run, rounding)
        yield Finding(
            _cells(last.job.pair.tokenizer, strategy, found), {"strategy": strategy.name, **divergence_figures(found)}
        )


def _cells(tokenizer: Any, strategy: Strategy, found: Divergence) -> tuple[str, ...]:
    said, target, *highest = (
        candidate_piece(tokenizer, candidate) for candidate in (found.ours, found.theirs, *found.highest)
    )
    moved = "-" if found.rounding is None else f"{found.rounding:.2g}"
    return (
        strategy.name,
        str(found.position + 1),
        said,
        target,
        ", ".join(highest),
        f"{found.gap:.4g}",
        moved,
        found.cause.value,
    )


def _conclusion(last: Last, findings: Sequence[Finding]) -> list[str]:
    causes = {finding.figures["cause"] for finding in findings}
    sentences = {
        Cause.SAMPLING: f"sampling: drawn from the same law with other numbers, as /verify {last.job.settings.verify} allows. "
        "/verify coupled makes it the same text.",
        Cause.ROUNDING: "rounding tie: the two runs computed this place in windows of different width, and what that moves the logits by "
        "decides between the two tokens.",
        Cause.UNEXPLAINED: "unexplained: this should not happen. Please report it, with the line of data that follows:",
    }
    return [sentence for cause, sentence in sentences.items() if cause in causes]


def _replay(last: Last, findings: Sequence[Finding]) -> str:
    """Everything that a replay of something unexplained needs, as one line of JSON."""
    if all(finding.figures["cause"] != Cause.UNEXPLAINED for finding in findings):
        return ""
    rounds = {
        strategy.name: [(step.drafted, step.accepted, step.token) for step in run.steps]
        for strategy, run, _ in last.compared
        if strategy.drafts and last.jobs[strategy.name].is_like(last.job)
    }
    found = [finding.figures for finding in findings]
    return json.dumps(
        {"prompt_ids": last.job.prompt, "divergences": found, "rounds": rounds, "runs": generation_records(last, {})}
    )


DIVERGENCE = Command("divergence", "", "where the last texts part from the target's, and why", _divergence)
