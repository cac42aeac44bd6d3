"""/whatif: predicts the last prompt's rounds, acceptance and speed for every draft length, from its finished text.

Rounds and acceptance come from the decoding loop itself, run over what the drafters propose along that text
(sampling.counterfactual). Times are computed from the measured costs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from utils.commands.experiments.predicted_speed import TargetTiming, drafting_cost, target_run
from utils.commands.outcomes import Outcome, RunReport
from utils.commands.registry import Command, CommandContext, Page
from utils.comparison.charts import LineChart, Marker
from utils.comparison.gamma_replay import replay_gammas
from utils.comparison.harness import Harness
from utils.comparison.job import Job
from utils.comparison.last_prompt import LastPrompt
from utils.comparison.reports import Finding, Progress, Report, ReportEvent
from utils.config.settings import Settings
from utils.decode.steps import Step
from utils.metrics.costs import Costs

HEADINGS = ("drafter", "gamma", "rounds", "accepted", "rate", "per forward", "tokens/s", "speed-up")
EXACT = "Rounds and acceptance equal those of real runs. Speeds are predicted from measured costs (/costs)."
ESTIMATE = "An estimate, as if under /verify coupled. Other rules draw other random numbers and accept slightly more."
Row = dict[str, Any]  # the figures of a finding


def _whatif(argument: str, context: CommandContext) -> Outcome:
    last, harness = context.harness.last(), context.harness
    timing = TargetTiming.of(target_run(last))
    # The text was made under the old settings; what drafts along it may be chosen anew.
    settings = replace(last.job.settings, drafter_kind=context.settings.drafter_kind, costs=context.settings.costs)
    findings = _findings(harness, _rerun_job(last, harness, settings), last, timing)
    return [RunReport(Report("whatif", last.text, settings, HEADINGS, findings, _conclusion, charts=_charts))]


def _rerun_job(last: LastPrompt, harness: Harness, settings: Settings) -> Job:
    """The last prompt as it would be run now."""
    job = harness.job(last.job.prompt, settings, last.job.history)
    return (
        # With /reset_in_between off a real run would start from the session's storage, which may already hold this
        # text.
        job if settings.reset_in_between else replace(job, storage=harness.state.storage, caches=harness.state.caches)
    )


def _findings(harness: Harness, job: Job, last: LastPrompt, timing: TargetTiming) -> Iterator[ReportEvent]:
    tokens, measured = target_run(last).tokens, _measured(last)
    drafting = [strategy for strategy in harness.runnable(job.settings) if strategy.drafts]
    yield Progress(f"replaying the target's {len(tokens)} tokens with {len(drafting)} drafters ...")
    costs, baseline = job.settings.costs or Costs(), len(tokens) / timing.alone(len(tokens))
    for strategy, gamma, steps, timings in replay_gammas(job, drafting, tokens):
        kind = str(strategy.drafter_label(job.pair))
        speed = len(tokens) / timing.predict(steps, costs, drafting_cost(timings, costs, kind))
        row = {
            "drafter": kind,
            "gamma": gamma,
            **_round_figures(steps),
            "tokens_per_second": speed,
            "speedup": speed / baseline,
            "measured_speedup": measured.get(kind) if gamma == last.job.settings.gamma else None,
            "exact": strategy.repeats_target(job.settings),
        }
        yield Finding(_cells(row), row)


def _measured(last: LastPrompt) -> dict[str, float | None]:
    """The speed-up of the last prompt's own runs, by drafter kind."""
    return {
        str(strategy.drafter_label(last.job.pair)): comparison.speedup
        for strategy, _, comparison in last.compared
        if strategy.drafts
    }


def _round_figures(steps: Sequence[Step]) -> Row:
    return {
        "rounds": len(steps),
        "drafted": sum(len(step.drafted) for step in steps),
        "accepted": sum(step.accepted for step in steps),
        "tokens_per_target_forward": sum(len(step.tokens) for step in steps) / len(steps),
    }


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["drafter"],
        "auto" if row["gamma"] is None else str(row["gamma"]),
        str(row["rounds"]),
        f"{row['accepted']}/{row['drafted']}",
        f"{row['accepted'] / row['drafted']:.3f}" if row["drafted"] else "-",
        f"{row['tokens_per_target_forward']:.2f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['speedup']:.2f}x",
    )


def _by_drafter(findings: Sequence[Finding]) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for finding in findings:
        rows.setdefault(finding.figures["drafter"], []).append(finding.figures)
    return rows


def _conclusion(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for kind, rows in _by_drafter(findings).items():
        best = max((row for row in rows if row["gamma"] is not None), key=lambda row: float(row["speedup"]))
        auto = next((f"; auto {row['speedup']:.2f}x" for row in rows if row["gamma"] is None), "")
        lines.append(f"{kind}: best at gamma {best['gamma']}, {best['speedup']:.2f}x{auto}")
    exact = all(finding.figures["exact"] for finding in findings)
    return [*lines, EXACT if exact else ESTIMATE]


def _charts(findings: Sequence[Finding]) -> list[LineChart]:
    """The predicted speed-up over gamma, up to the gamma from which no drafter's rounds change any more."""
    rows = _by_drafter(findings)
    fixed = {kind: [row for row in of_kind if row["gamma"] is not None] for kind, of_kind in rows.items()}
    last = max(map(_last_change, fixed.values()))
    series = {kind: [row["speedup"] for row in of_kind[: last + 1]] for kind, of_kind in fixed.items()}
    markers = [
        Marker(name, kind, min(_mean_drafts(row), last), row[figure])
        for name, figure in (("auto", "speedup"), ("measured", "measured_speedup"))
        for kind, of_kind in rows.items()
        for row in of_kind
        if row[figure] is not None and (name != "auto" or row["gamma"] is None)
    ]
    ticks = [str(gamma) for gamma in range(last + 1)]
    return [LineChart("predicted speed-up by gamma", "gamma", ticks, series, markers, 1.0)]


def _last_change(rows: Sequence[Row]) -> int:
    """The smallest gamma whose rounds all larger ones repeat."""
    rounds = [(row["rounds"], row["drafted"], row["accepted"]) for row in rows]
    return next(gamma for gamma in range(len(rounds)) if all(other == rounds[gamma] for other in rounds[gamma:]))


def _mean_drafts(row: Row) -> float:
    """Where a row belongs on the axis: its gamma, or the drafts per round where that is adaptive."""
    return float(row["drafted"] / row["rounds"] if row["gamma"] is None else row["gamma"])


WHATIF = Command(
    "whatif",
    "",
    "the predicted speed of every gamma",
    _whatif,
    group="does it help?",
    rank=4,
    page=Page(
        "Predict rounds, acceptance and speed of the last prompt for every gamma from 0 to 16, and for auto, without "
        "decoding again.",
        ("> /whatif", "model: best at gamma 4"),
        see_also=("gamma", "why", "race", "predicted"),
    ),
)
