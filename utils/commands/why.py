"""/why: how the last prompt spent its time, what limits its speed-up, and what to change first.

Costs are measured anew on the loaded models. Acceptance and the times of drafting and verifying are those of the last
run. The prediction is that of utils.commands.experiments.predicted_speed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from utils.commands.experiments.predicted_speed import TargetTiming, costs_of_run, drafting_cost, target_run
from utils.commands.shared.columns import NOTHING, ResultColumn, ResultTable, Row, figure, figures_of
from utils.commands.shared.outcomes import Outcome, RunReport
from utils.commands.shared.registry import Command, CommandContext, Page
from utils.comparison.reports import Finding, Progress, Report, ReportEvent
from utils.comparison.session_state import LastPrompt, LocalResult
from utils.comparison.warm_up import with_costs
from utils.engine import Engine
from utils.engine.forward_timing import WIDTHS, time_of_repeats
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.metrics.results import Generation
from utils.text import count_of

SHOWN_POSITIONS = 4
MANY_DECLINED = 0.5  # share of rounds without drafts above which declining is the limit
MUCH_OVERHEAD = 0.1  # share of time outside the models above which it can be the limit
HIGH_COST = 0.2  # extra cost per decode step above which drafting or verifying can be the limit
FEW_ACCEPTED = 0.5
MIN_TRIALS = 4  # rounds that must have reached a position before its acceptance is used
MIN_GAIN = 1.02  # predicted improvement from which another gamma is recommended
REPEATS = 9  # of each verify width, when costs are measured


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
    ResultColumn("verify cost", lambda row: f"{1 + row['window_cost']:.2f}"),
    ResultColumn(
        "by position", lambda row: " ".join(f"{rate:.2f}" for rate in row["by_position"][:SHOWN_POSITIONS]) or NOTHING
    ),
    ResultColumn("rounds without drafts", lambda row: f"{row['declined_rounds']}/{row['rounds']}"),
    *map(_seconds_column, ("drafting", "verifying", "other")),
)


@dataclass(frozen=True, slots=True)
class RunCosts:
    """The cost of a run in decode steps, by cause, and the share of its measured time outside the models."""

    tokens: int
    forwards: float
    verifying: float  # the extra time of verify passes over decode steps
    drafting: float
    other: float

    @classmethod
    def of(cls, run: Generation, costs: Costs, kind: str | None, prompt: int = 0) -> Self:
        """The costs of a run. `kind` is the drafter kind of rounds that do not name it, `prompt` a number of tokens."""
        total = sum(timing.total for timing in run.timings)
        inside = sum(timing.drafting + timing.verifying for timing in run.timings)
        return cls(
            len(run.tokens),
            run.target_forwards,
            sum(costs.verify_cost(len(step.drafted)) for step in run.steps),
            drafting_cost(run.timings, costs, kind, prompt),
            max(0.0, 1 - inside / total) if total else 0.0,
        )

    @property
    def steps(self) -> float:
        """All decode steps."""
        return self.forwards + self.verifying + self.drafting


def _why(argument: str, context: CommandContext) -> Outcome:
    last = context.harness.last()
    target = target_run(last)
    if not any(strategy.drafts and run.timings for strategy, run, _ in last.local):
        raise UserError(
            "a run that drafts is needed: turn one on, for example with /speculative on, and send a prompt."
        )
    events = _events(last, TargetTiming.of(target), context)
    report = Report(*("why", last.text, last.job.settings, TABLE.headings, events, _conclusion), transposed=True)
    return [RunReport(report)]


def _events(last: LastPrompt, timing: TargetTiming, context: CommandContext) -> Iterator[ReportEvent]:
    harness = context.harness
    engine = harness.pair.engine
    yield Progress(f"1 of 2: measuring what verify passes cost{_expected(engine)} ...")
    engine.measure(repeats=REPEATS)
    yield Progress("2 of 2: measuring what drafts cost ...")
    # costs=None, because stored costs would be used instead of new measurements.
    settings = replace(context.settings, drafter_kind=last.job.settings.drafter_kind, costs=None)
    costs = with_costs(harness, settings).costs
    assert costs is not None
    for compared in last.local:
        strategy, run, _ = compared
        if strategy.drafts and run.timings:
            row = _figures(compared, strategy.drafter_label(last.job.pair), costs, timing, prompt=len(last.job.prompt))
            yield TABLE.finding(row | {"gamma": last.job.settings.gamma})


def _expected(engine: Engine) -> str:
    """Estimated duration of the measurement from known costs. It is empty if no costs are known."""
    widths = (width for width in WIDTHS if width <= len(engine.costs) + 1)
    forwards = sum(1 + (engine.costs[width - 2] if width > 1 else 0.0) for width in widths)
    seconds = time_of_repeats(REPEATS, forwards * engine.step_seconds)
    return f", about {seconds:.0f} s" if seconds >= 1 else ""


def _figures(
    compared: LocalResult, kind: str | None, costs: Costs, timing: TargetTiming, *, prompt: int
) -> dict[str, Any]:
    strategy, run, comparison = compared
    costs = costs_of_run(costs, prompt, len(run.tokens))
    spent = RunCosts.of(run, costs, kind, prompt)
    drafts = sum(one.drafts for one in run.timings)
    draft_cost = drafting_cost(run.timings, costs, kind, 0) / drafts if drafts else costs.draft_cost(kind)
    best, gain = best_gamma(run, costs, draft_cost)
    return {
        "strategy": strategy.name,
        "speedup": comparison.speedup,
        "predicted": timing.alone(spent.tokens) / timing.predict(run.steps, costs, spent.drafting),
        "draft_cost": draft_cost,
        "window_cost": costs.verify_cost(round(run.drafts_per_round or 0)),
        "by_position": [accepted / tried for accepted, tried in run.accepted_by_position if tried],
        "declined": run.declined_rounds / len(run.steps),
        "declined_rounds": run.declined_rounds,
        "rounds": len(run.steps),
        "tokens_per_round": len(run.tokens) / len(run.steps),
        "drafts_per_round": run.drafts_per_round or 0.0,
        "seconds": _seconds(run),
        "binds": limit(spent, run, costs, draft_cost),
        "best_gamma": best,
        "best_rate": gain,
        "rate": spent.tokens / spent.steps if spent.steps else 1.0,
    }


def _seconds(run: Generation) -> dict[str, float]:
    parts = ((timing.drafting, timing.verifying, timing.total) for timing in run.timings)
    drafting, verifying, total = map(sum, zip(*parts, strict=True))
    return {"drafting": drafting, "verifying": verifying, "other": total - drafting - verifying}


def limit(spent: RunCosts, run: Generation, costs: Costs, draft_cost: float) -> str:
    """What reduces the speed-up most, in words."""
    rounds = len(run.steps)
    # The order matters: a cause that hides others comes first.
    if run.declined_rounds > MANY_DECLINED * rounds:
        share = f"{run.declined_rounds / rounds:.0%}"
        return f"nothing was drafted in {share} of the rounds, so they ran at the speed of target-only"
    # The share of time is scaled to decode steps, the unit of the costs it is compared with.
    if spent.other > MUCH_OVERHEAD and spent.other * spent.steps > max(spent.verifying, spent.drafting):
        return f"{spent.other:.0%} of the time is overhead outside the models"
    drafts = round(run.drafted / rounds)
    if spent.verifying >= spent.drafting and spent.verifying > HIGH_COST * spent.forwards:
        return f"verifying {count_of(drafts, 'draft')} costs {1 + costs.verify_cost(drafts):.1f} target forwards"
    if spent.drafting > HIGH_COST * spent.forwards:
        cost = f"each drafted token costs {draft_cost:.0%} of a target forward"
        return f"{cost}, and rounds draft {run.drafted / rounds:.1f} on average"
    if (run.acceptance_rate or 0.0) < FEW_ACCEPTED:
        return f"few drafts are accepted: {run.accepted} of {run.drafted}"
    return f"nothing stands out; a round generates {spent.tokens / rounds:.1f} tokens on average"


def best_gamma(run: Generation, costs: Costs, draft_cost: float) -> tuple[int, float]:
    """The gamma with the highest estimate, and its tokens per decode step.

    The estimate uses the acceptance by position, up to the first position that too few rounds have reached. Rounds
    without drafts accept nothing.
    """
    tokens, reached, rates = 1.0, 1.0, [1.0]
    for position, (accepted, tried) in enumerate(run.accepted_by_position):
        # Position 0 counts all rounds, because a round without drafts accepts nothing.
        tried = tried if position else len(run.steps)
        if tried < MIN_TRIALS:
            break
        reached *= accepted / tried
        tokens += reached  # expected tokens per round: 1 and the product of the rates so far, summed
        drafts = position + 1
        rates.append(tokens / (1 + costs.verify_cost(drafts) + drafts * draft_cost))
    best = max(range(len(rates)), key=rates.__getitem__)
    return best, rates[best]


def advice(row: dict[str, Any]) -> str:
    """What to change first."""
    if not row["by_position"]:
        return "Nothing was drafted, so there is no estimate. Try /gamma 4"
    # The best rate is at least 1, that of gamma 0.
    if row["best_rate"] < MIN_GAIN or not row["best_gamma"]:
        return "No gamma would help on this prompt"
    if row["best_rate"] < row["rate"] * MIN_GAIN:
        return f"/gamma {'auto' if row['gamma'] is None else row['gamma']} is already the best choice"
    # Adaptive gamma drafts far where drafts are likely to be accepted. In other rounds a fixed gamma would do worse.
    if row["gamma"] is None:
        return "A fixed gamma may do better than auto: /whatif compares them"
    return f"Try /gamma {row['best_gamma']}: predicted to decode at {row['best_rate']:.2f}x target-only"


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    return [
        *(f"{row['strategy']}: {row['binds']}. {advice(row)}." for row in figures_of(findings)),
        "Unit of the costs: one target forward over one token, measured just now. /whatif and auto gamma use the "
        "earlier measurement that /costs shows.",
        "Next: /whatif predicts every gamma for this text.",
    ]


WHY = Command(
    "why",
    "",
    "where the time went, and what limits it",
    _why,
    group="does it help?",
    rank=3,
    page=Page(
        "Where the time of the last prompt went: drafting, verifying and the rest, predicted and measured speed-up, "
        "what limits it, and what to change first.",
        ("> /why", "speculative   predicted 1.6x, measured 1.5x"),
        see_also=("whatif", "race", "costs", "predicted"),
    ),
)
