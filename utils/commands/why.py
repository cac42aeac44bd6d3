"""/why: how the last prompt spent its time, and what limits its speed-up, by the times of its own runs."""

from collections.abc import Iterator, Sequence

from utils.commands.experiments.speed_model import TargetTiming, bottleneck, draft_figures, target_run
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure, figures_of
from utils.commands.shared.outcomes import Outcome
from utils.commands.shared.registry import Command, CommandContext
from utils.comparison.reports import Finding
from utils.comparison.session_state import LastPrompt
from utils.errors import UserError

SHOWN_POSITIONS = 4
UNIT = "Unit of the costs: one target forward over one token, by the times of these runs."


def _positions(row: Row) -> str:
    """The acceptance of the first drafts of a round."""
    rates = [accepted / tried for accepted, tried in row["accepted_by_position"][:SHOWN_POSITIONS] if tried]
    return " ".join(f"{rate:.2f}" for rate in rates) or NOTHING


def _seconds_column(part: str) -> ResultColumn:
    """The seconds of one part of the run, and their share."""

    def shown(row: Row) -> str:
        total = sum(row["seconds"].values())
        return f"{row['seconds'][part]:.2f} s, {row['seconds'][part] / total:.0%}" if total else NOTHING

    return ResultColumn(part, shown)


TABLE = ResultTable(
    figure("strategy", "strategy"),
    figure("measured speed-up", "speedup", "{:.2f}x"),
    figure("tokens/round", "tokens_per_round", "{:.2f}"),
    figure("drafts/round", "drafts_per_round", "{:.1f}"),
    figure("draft cost", "draft_cost", "{:.3f}"),
    figure("verify cost", "verify_cost", "{:.2f}"),
    ResultColumn("by position", _positions),
    ResultColumn("rounds without drafts", lambda row: f"{row['declined_rounds']}/{row['rounds']}"),
    *map(_seconds_column, ("drafting", "verifying", "other")),
)


def _why(argument: str, context: CommandContext) -> Outcome:
    last = context.harness.last()
    TargetTiming.of(target_run(last))  # raises UserError if the target's own run cannot be compared with
    if not any(one.strategy.drafts and one.run.timings for one in last.local):
        raise UserError(
            "a run that drafts is needed: turn one on, for example with /speculative on, and send a prompt."
        )
    return [TABLE.report("why", last.text, last.job.settings, _findings(last), conclude=_conclusion, transposed=True)]


def _findings(last: LastPrompt) -> Iterator[Finding]:
    target = target_run(last)
    for strategy, run, comparison in last.local:
        if strategy.drafts and run.timings:
            parts = ((one.drafting, one.verifying, one.total) for one in run.timings)
            drafting, verifying, total = map(sum, zip(*parts, strict=True))
            yield TABLE.finding(
                {
                    **draft_figures([(run, target)], comparison.speedup or 1.0),
                    "strategy": strategy.name,
                    "gamma": last.job.settings.gamma,
                    "speedup": comparison.speedup,
                    "tokens_per_round": len(run.tokens) / len(run.steps),
                    "seconds": {"drafting": drafting, "verifying": verifying, "other": total - drafting - verifying},
                }
            )


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
    about="Where the time of the last prompt went: drafting, verifying and the rest, and what limits its speed-up.",
    example=("> /why", "speculative: the bottleneck is the cost of drafting; without it ..."),
    see_also=("whatif", "race", "costs"),
)
