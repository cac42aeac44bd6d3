"""/divergence: why the last prompt's texts part, in full, and what to send where it is not explained."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from utils.bench import Last, divergences
from utils.commands.registry import Command, Outcome, Situation
from utils.divergence import Cause, Divergence
from utils.errors import UserError
from utils.printing import candidate_piece
from utils.records import divergence_figures, generation_records
from utils.reports import Finding, Progress, Report
from utils.strategies import Strategy

HEADINGS = ("strategy", "token", "said", "target said", "target's highest", "gap in logits", "widths move logits by", "cause")


def _divergence(argument: str, situation: Situation) -> Outcome:
    last = situation.bench.last()
    compared = [(strategy, comparison) for strategy, _, comparison in last.compared if strategy.lossless and strategy.name != "target"]
    if all(comparison.same is None for _, comparison in compared):
        raise UserError("there is nothing to compare: the last prompt needs finished runs of the target and of another strategy.")
    if not any(comparison.same is False for _, comparison in compared):
        return Outcome(reply="No text differs: every strategy said what the target says.")
    rounding = situation.bench.memory.rounding
    return Outcome(report=Report("divergence", last.text, HEADINGS, _findings(last, rounding), partial(_conclusion, last), upright=True))


def _findings(last: Last, rounding: float) -> Iterator[Progress | Finding]:
    for strategy, found in divergences(last, rounding):
        yield Finding(_cells(last.job.pair.tokenizer, strategy, found), {"strategy": strategy.name, **divergence_figures(found)})


def _cells(tokenizer: Any, strategy: Strategy, found: Divergence) -> tuple[str, ...]:
    said, target, *highest = (candidate_piece(tokenizer, candidate) for candidate in (found.ours, found.theirs, *found.highest))
    moved = "-" if found.rounding is None else f"{found.rounding:.2g}"
    return (strategy.name, str(found.position + 1), said, target, ", ".join(highest), f"{found.gap:.4g}", moved, found.cause.value)


def _conclusion(last: Last, findings: Sequence[Finding]) -> list[str]:
    causes = {finding.figures["cause"] for finding in findings}
    lines = []
    if Cause.SAMPLING in causes:
        lines.append(
            f"sampling: drawn from the same law with other numbers, as /verify {last.job.settings.verify} allows. "
            "/verify coupled makes it the same text."
        )
    if Cause.ROUNDING in causes:
        lines.append("rounding tie: the same logits, moved by no more than windows of another width move them here, give the other token.")
    if Cause.UNEXPLAINED in causes:
        lines.append("unexplained: this should not happen. Please report it with the next line, which holds all that a replay needs:")
        lines.append(json.dumps({"prompt_ids": last.job.prompt, "runs": generation_records(last, {})}, ensure_ascii=False))
    return lines


DIVERGENCE = Command("divergence", "", "where the last texts part from the target's, and why", _divergence)
