"""/why: how the last prompt spent its time, and what limits its speed-up.

Costs are measured anew on the loaded models. Acceptance and times are those of the last run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from utils.commands.experiments.speed_model import (
    TargetTiming,
    bottleneck,
    costs_of_run,
    draft_figures,
    drafting_cost,
    target_run,
)
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure, figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.job import Job
from utils.comparison.reports import Finding, Progress, Report, ReportEvent
from utils.comparison.session_state import LastPrompt, LocalResult
from utils.comparison.warm_up import with_costs
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.metrics.results import Generation

SHOWN_POSITIONS = 4
REPEATS = 9  # of each verify width, when costs are measured
UNIT = (
    "Unit of the costs: one target forward over one token, measured just now. /whatif and auto gamma use the earlier "
    "measurement that /costs shows."
)


def _seconds_column(part: str) -> ResultColumn:
    """The seconds of one part of the run, and their share."""

    def shown(row: Row) -> str:
        total = sum(row["seconds"].values())
        return f"{row['seconds'][part]:.2f} s, {row['seconds'][part] / total:.0%}" if total else NOTHING

    return ResultColumn(part, shown)


TABLE = ResultTable(
    figure("strategy", "strategy"),
    figure("measured speed-up", "speedup", "{:.2f}x"),
    figure("predicted speed-up", "predicted", "{:.2f}x"),
    figure("tokens/round", "tokens_per_round", "{:.2f}"),
    figure("drafts/round", "drafts_per_round", "{:.1f}"),
    figure("draft cost", "draft_cost", "{:.3f}"),
    figure("verify cost", "verify_cost", "{:.2f}"),
    ResultColumn(
        "by position", lambda row: " ".join(f"{rate:.2f}" for rate in row["by_position"][:SHOWN_POSITIONS]) or NOTHING
    ),
    ResultColumn("rounds without drafts", lambda row: f"{row['declined_rounds']}/{row['rounds']}"),
    *map(_seconds_column, ("drafting", "verifying", "other")),
)


def _why(argument: str, context: CommandContext) -> Outcome:
    last = context.harness.last()
    target = target_run(last)
    TargetTiming.of(target)  # raises UserError before anything is measured
    drafting = [one for one in last.local if one.strategy.drafts and one.run.timings]
    if not drafting:
        raise UserError(
            "a run that drafts is needed: turn one on, for example with /speculative on, and send a prompt."
        )
    events = _events(last, target, drafting, context)
    report = Report(*("why", last.text, last.job.settings, TABLE.headings, events, _conclusion), transposed=True)
    return [RunReport(report)]


def _events(
    last: LastPrompt, target: Generation, drafting: Sequence[LocalResult], context: CommandContext
) -> Iterator[ReportEvent]:
    yield Progress("1 of 2: measuring what verify passes cost ...")
    context.harness.pair.engine.measure(repeats=REPEATS)
    yield Progress("2 of 2: measuring what drafts cost ...")
    # costs=None, because stored costs would be used instead of new measurements.
    settings = replace(context.settings, drafter_kind=last.job.settings.drafter_kind, costs=None)
    costs = with_costs(context.harness, settings).costs
    for compared in drafting:
        yield TABLE.finding(_figures(compared, last.job, target, costs or Costs()))


def _figures(compared: LocalResult, job: Job, target: Generation, costs: Costs) -> dict[str, Any]:
    """The figures of one run. Its costs are those measured now, and its limits follow from its own times."""
    strategy, run, comparison = compared
    kind, tokens = strategy.drafter_label(job.pair), len(run.tokens)
    costs, timing = costs_of_run(costs, len(job.prompt), tokens), TargetTiming.of(target)
    drafts = sum(one.drafts for one in run.timings)
    draft_cost = drafting_cost(run.timings, costs, kind, 0) / drafts if drafts else costs.draft_cost(kind)
    predicted = timing.predict(run.steps, costs, drafting_cost(run.timings, costs, kind, len(job.prompt)))
    parts = ((one.drafting, one.verifying, one.total) for one in run.timings)
    drafting, verifying, total = map(sum, zip(*parts, strict=True))
    return {
        **draft_figures([(run, target)], comparison.speedup or 1.0),
        "strategy": strategy.name,
        "gamma": job.settings.gamma,
        "speedup": comparison.speedup,
        "predicted": timing.alone(tokens) / predicted,
        "draft_cost": draft_cost,
        "verify_cost": 1 + costs.verify_cost(round(run.drafts_per_round or 0)),
        "by_position": [accepted / tried for accepted, tried in run.accepted_by_position if tried],
        "tokens_per_round": tokens / len(run.steps),
        "seconds": {"drafting": drafting, "verifying": verifying, "other": total - drafting - verifying},
    }


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    known = (row for row in figures_of(findings) if row["bottleneck"] and row["speedup"])
    lines = [f"{row['strategy']}: the bottleneck is {bottleneck(row)}." for row in known]
    return [*lines, UNIT, "Next: /whatif predicts every gamma for this text."]


WHY = Command(
    "why",
    "",
    "where the time went, and what limits it",
    _why,
    group="does it help?",
    rank=3,
    page=Page(
        "Where the time of the last prompt went: drafting, verifying and the rest, predicted and measured speed-up, "
        "and what limits it most.",
        ("> /why", "speculative   predicted 1.6x, measured 1.5x"),
        see_also=("whatif", "race", "costs", "predicted"),
    ),
)
