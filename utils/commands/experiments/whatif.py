"""/whatif: what every draft length would have come to on the last prompt, told from its finished text.

Rounds and acceptance come from the loop itself, run over what the drafters propose along that text (utils.comparison.counterfactual, handed in with
the bench); times are those rounds at the costs that were measured when the pair was loaded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from utils.commands.registry import Command, Outcome, Situation
from utils.comparison.harness import Bench, Last
from utils.comparison.reports import Chart, Finding, Progress, Report
from utils.comparison.strategies import Job, Strategy
from utils.config.settings import Settings
from utils.decode.steps import Step
from utils.errors import UserError
from utils.metrics.costs import Costs
from utils.metrics.results import Generation, acceptance_of
from utils.metrics.stopwatch import Lap

HEADINGS = ("drafter", "gamma", "rounds", "accepted", "rate", "per forward", "tokens/s", "speed-up")


@dataclass(frozen=True, slots=True)
class Rate:
    """Of plain decoding: seconds before its second token but for a step, and of a step."""

    start: float
    step: float

    @classmethod
    def of(cls, run: Generation) -> "Rate":
        """As a run of the target alone has shown it. Raises UserError where it made too few tokens."""
        if len(run.steps) < 2 or run.first_seconds is None:
            raise UserError("two tokens of the target's own are needed: send a prompt with a longer answer.")
        step = (run.seconds - run.first_seconds) / (len(run.steps) - 1)
        return cls(max(0.0, run.first_seconds - step), step)

    def seconds(self, steps: Sequence[Step], costs: Costs, drafting: float) -> float:
        """Of rounds that cost what the table says, all their drafts `drafting` plain steps."""
        return self.start + self.step * (drafting + sum(1 + costs.window(len(step.drafted)) for step in steps))


def target_of(last: Last) -> Generation:
    """The target's own run. Raises UserError where there is none."""
    if last.target is not None:
        return last.target
    if last.job.settings.target:
        raise UserError("the last prompt ended before the target's own run: send it again.")
    raise UserError("the target's own run is needed: turn it on with /target on, and send a prompt.")


def drafting(laps: Sequence[Lap], costs: Costs, label: str | None) -> float:
    """What the drafts of a run take in plain steps, each by the cost of the kind that worked it out."""
    return sum(lap.drafts * costs.step(lap.by or label) for lap in laps)


def _whatif(argument: str, situation: Situation) -> Outcome:
    last, bench = situation.bench.last(), situation.bench
    target = target_of(last)
    rate = Rate.of(target)
    settings = replace(last.job.settings, drafter_kind=situation.settings.drafter_kind, costs=situation.settings.costs)
    chosen = [strategy for strategy in bench.runnable(settings) if strategy.drafts]
    findings = _findings(bench, _again(last, bench, settings), chosen, target, rate=rate)
    report = Report("whatif", last.text, settings, HEADINGS, findings, _conclusion, chart=_chart)
    return Outcome(report=report)


def _again(last: Last, bench: Bench, settings: Settings) -> Job:
    """The last prompt as it would be run now."""
    job = bench.job(last.job.prompt, settings, last.job.history)
    return job if settings.reset_in_between else replace(job, storage=bench.memory.storage, kept=bench.memory.kept)


def _findings(
    bench: Bench, job: Job, chosen: Sequence[Strategy], target: Generation, *, rate: Rate
) -> Iterator[Progress | Finding]:
    yield Progress(
        f"reading {len(target.tokens)} tokens of the target's, and having {len(chosen)} drafters read along ..."
    )
    costs, plain = job.settings.costs or Costs(), len(target.tokens) / (rate.start + rate.step * len(target.tokens))
    for strategy, gamma, steps, laps in bench.probes.foresee(job, chosen, target.tokens):
        label = str(strategy.drafter_kind(job.pair))
        seconds = rate.seconds(steps, costs, drafting(laps, costs, label))
        yield _finding(
            label, gamma, steps, len(target.tokens) / seconds, plain=plain, exact=strategy.repeats_target(job.settings)
        )


def _finding(
    label: str, gamma: int | None, steps: Sequence[Step], speed: float, *, plain: float, exact: bool
) -> Finding:
    drafted, accepted = (
        sum(counts) for counts in zip(*((len(step.drafted), step.accepted) for step in steps), strict=True)
    )
    rate, made = acceptance_of(steps), sum(len(step.tokens) for step in steps)
    name = "auto" if gamma is None else str(gamma)
    figures: dict[str, Any] = {
        "drafter": label,
        "gamma": gamma,
        "rounds": len(steps),
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_target_forward": made / len(steps),
        "tokens_per_second": speed,
        "speedup": speed / plain,
        "exact": exact,
    }
    cells = (
        label,
        name,
        str(len(steps)),
        f"{accepted}/{drafted}",
        "-" if rate is None else f"{rate:.3f}",
        f"{made / len(steps):.2f}",
    )
    return Finding((*cells, f"{speed:.1f}", f"{speed / plain:.2f}x"), figures)


def _by_drafter(findings: Sequence[Finding]) -> dict[str, list[dict[str, Any]]]:
    told: dict[str, list[dict[str, Any]]] = {}
    for finding in findings:
        told.setdefault(finding.figures["drafter"], []).append(finding.figures)
    return told


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for label, rows in _by_drafter(findings).items():
        fixed = [row for row in rows if row["gamma"] is not None]
        best = max(fixed, key=lambda row: float(row["speedup"]))
        auto = next((f"; auto {row['speedup']:.2f}x" for row in rows if row["gamma"] is None), "")
        lines.append(f"{label}: best at gamma {best['gamma']}, {best['speedup']:.2f}x{auto}")
    exact = all(finding.figures["exact"] for finding in findings)
    lines.append(
        "Rounds and acceptance are what real runs come to here; speeds are predicted from measured costs (/costs)."
        if exact
        else "An estimate, as if under /verify coupled: other rules draw other numbers, and accept a little more."
    )
    return lines


def _chart(findings: Sequence[Finding]) -> Chart:
    series = {
        label: [row["tokens_per_second"] for row in rows if row["gamma"] is not None]
        for label, rows in _by_drafter(findings).items()
    }
    ticks = [str(place) for place in range(max(map(len, series.values())))]
    return Chart(series, "predicted tokens/s", "gamma", ticks)


WHATIF = Command(
    "whatif", "", "every gamma from 0 to 16, and auto, on the last prompt: rounds, acceptance, predicted speed", _whatif
)
