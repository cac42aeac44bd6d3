"""/why: where the last prompt's time went, and what binds.

Leviathan et al. 2023, section 3.3, with measured costs: a round of k drafts takes 1 + v(k) + k c plain steps, v(k) what a window of k
drafts takes more than a single token, c what a draft takes. The costs are measured anew on the loaded models; how many drafts stood, and
how long drafting and verifying really took, is the last run's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from utils.commands.experiments.whatif import Rate, drafting, target_of
from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Compared, Last
from utils.comparison.reports import Finding, Progress, Report
from utils.comparison.warm_up import measured
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.metrics.results import Generation

HEADINGS = (
    *(
        "strategy",
        "speed-up, measured",
        "speed-up, predicted",
        "tokens per round",
        "drafts per round",
        "a draft",
        "its window",
    ),
    *("stood, by place", "rounds without drafts", "time drafting", "time verifying", "other time"),
)
MANY, MUCH = 0.5, 0.1  # rounds without drafts; time outside the models
OFTEN = 4  # a place that was tried less often tells nothing
WORTH = 1.02  # of what a run made, what another number of drafts must promise
REPEATS = 9  # of every window, when costs are asked for


@dataclass(frozen=True, slots=True)
class Account:
    """What a run's rounds took in plain steps, by what took it."""

    tokens: int
    forwards: float
    windows: float
    drafting: float
    other: float  # share of the measured time

    @classmethod
    def of(cls, run: Generation, costs: Costs, label: str | None) -> "Account":
        """By measured costs, those of drafts by the kind of drafter; the rest by the stopwatch."""
        whole, inside = (
            sum(parts) for parts in zip(*((lap.whole, lap.drafting + lap.verifying) for lap in run.laps), strict=True)
        )
        return cls(
            len(run.tokens),
            run.target_forwards,
            sum(costs.window(len(step.drafted)) for step in run.steps),
            drafting(run.laps, costs, label),
            max(0.0, 1 - inside / whole) if whole else 0.0,
        )

    @property
    def steps(self) -> float:
        """All of it."""
        return self.forwards + self.windows + self.drafting


def _why(argument: str, situation: Situation) -> Outcome:
    last = situation.bench.last()
    target_of(last)
    if not any(strategy.drafts and run.laps for strategy, run, _ in last.compared):
        raise UserError(
            "a run that drafts is needed: turn one on, for example with /speculative on, and send a prompt."
        )
    Rate.of(target_of(last))  # long enough
    return Outcome(
        report=Report(
            "why", last.text, last.job.settings, HEADINGS, _findings(last, situation), _conclusion, upright=True
        )
    )


def _findings(last: Last, situation: Situation) -> Iterator[Progress | Finding]:
    bench = situation.bench
    yield Progress("measuring what drafts and windows cost here ...")
    bench.pair.engine.measure(repeats=REPEATS)
    costs = measured(bench, replace(situation.settings, drafter_kind=last.job.settings.drafter_kind, costs=None)).costs
    assert costs is not None
    rate = Rate.of(target_of(last))
    for compared in last.compared:
        if compared[0].drafts and compared[1].laps:
            yield _finding(compared, last, costs, rate)


def _finding(compared: Compared, last: Last, costs: Costs, rate: Rate) -> Finding:
    strategy, run, comparison = compared
    account = Account.of(run, costs, strategy.drafter_kind(last.job.pair))
    worked_out = sum(lap.drafts for lap in run.laps)
    draft = account.drafting / worked_out if worked_out else costs.step(strategy.drafter_kind(last.job.pair))
    predicted = (rate.start + rate.step * account.tokens) / rate.seconds(run.steps, costs, account.drafting)
    times = zip(*((lap.drafting, lap.verifying, lap.whole) for lap in run.laps), strict=True)
    drafts, verifying, whole = map(sum, times)
    places = [accepted / tried for accepted, tried in run.accepted_by_position if tried]
    best, gain = _best(run, costs, draft)
    figures: dict[str, Any] = {
        "strategy": strategy.name,
        "speedup": comparison.speedup,
        "predicted": predicted,
        "draft_cost": draft,
        "window_cost": costs.window(round(run.drafts_per_round or 0)),
        "by_position": places,
        "declined": run.declined_rounds / len(run.steps),
        "seconds": {"drafting": drafts, "verifying": verifying, "other": whole - drafts - verifying},
        "binds": binding(account, run, costs, draft),
        "best_gamma": best,
        "best_rate": gain,
        "rate": account.tokens / account.steps if account.steps else 1.0,
    }
    cells = (
        strategy.name,
        "-" if comparison.speedup is None else f"{comparison.speedup:.2f}x",
        f"{predicted:.2f}x",
        f"{account.tokens / len(run.steps):.2f}",
        f"{run.drafts_per_round or 0:.1f}",
        f"{draft:.3f} steps",
        f"{1 + figures['window_cost']:.2f} steps",
        " ".join(f"{place:.2f}" for place in places[:6]) or "-",
        f"{run.declined_rounds}/{len(run.steps)}",
        *(f"{seconds:.2f} s, {seconds / whole:.0%}" if whole else "-" for seconds in figures["seconds"].values()),
    )
    return Finding(cells, figures)


def binding(account: Account, run: Generation, costs: Costs, draft: float) -> str:
    """What costs most of the speed-up that there could be, in words."""
    rounds = len(run.steps)
    if run.declined_rounds > MANY * rounds:
        return f"the drafter declined {run.declined_rounds / rounds:.0%} of the rounds: they are plain steps"
    if account.other > MUCH and account.other * account.steps > max(account.windows, account.drafting):
        return f"overhead outside the models: {account.other:.0%} of the time"
    width = round(run.drafted / rounds)
    if account.windows >= account.drafting and account.windows > 0.2 * account.forwards:
        return (
            f"a window of {width + 1} tokens costs {1 + costs.window(width):.1f} steps: verifying drafts is dear here"
        )
    if account.drafting > 0.2 * account.forwards:
        return f"a draft costs {draft:.2f} of a step, and a round has {run.drafted / rounds:.1f}"
    stood = run.accepted / run.drafted if run.drafted else 0.0
    return (
        f"few drafts stand: {run.accepted} of {run.drafted}"
        if stood < MANY
        else f"nothing in particular: {account.tokens / rounds:.1f} tokens a round"
    )


def _best(run: Generation, costs: Costs, draft: float) -> tuple[int, float]:
    """The gamma that promises most, and tokens per plain step with it.

    By acceptance by place, as far as places were tried often enough to tell; a round without drafts has none that stands.
    """
    tokens, reached, rates = 1.0, 1.0, [1.0]
    for place, (accepted, tried) in enumerate(run.accepted_by_position):
        tried = tried if place else len(run.steps)
        if tried < OFTEN:
            break
        reached *= accepted / tried
        tokens += reached
        rates.append(tokens / (1 + costs.window(place + 1) + (place + 1) * draft))
    best = max(range(len(rates)), key=rates.__getitem__)
    return best, rates[best]


def _advice(figures: dict[str, Any]) -> str:
    """What to change first."""
    best = figures["best_gamma"]
    if not figures["by_position"]:
        return "nothing was drafted, so nothing is known of its drafts: try a fixed /gamma"
    if figures["best_rate"] < figures["rate"] * WORTH:
        return "no other /gamma promises more by these figures"
    return (
        f"try /gamma {best}, by these figures {figures['best_rate']:.2f} tokens per step"
        if best
        else "no /gamma would pay"
    )


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for figures in (finding.figures for finding in findings):
        lines.append(f"{figures['strategy']}: {figures['binds']}; {_advice(figures)}.")
    lines.append(
        "A draft and its window are in plain steps of the target, measured now. /whatif tells every gamma on this very text."
    )
    return lines


WHY = Command(
    "why", "", "where the last prompt's time went, predicted against measured speed-up, and what to change first", _why
)
